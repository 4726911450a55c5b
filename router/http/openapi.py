"""Additions to /openapi.json that FastAPI cannot derive, since handlers read request bodies
themselves."""

from __future__ import annotations

import asyncio
import functools
import json
from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel

from router.access.access import OPEN
from router.http.errors import is_anthropic


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorResponse(BaseModel):
    error: ErrorBody


JSON = "application/json"
_SCHEMA = "#/components/schemas/{model}"
_ERROR = {"$ref": _SCHEMA.format(model=ErrorResponse.__name__)}


def _refused(why: str) -> dict[str, Any]:
    return {"description": why, "content": {JSON: {"schema": _ERROR}}}


ERRORS: dict[int | str, dict[str, Any]] = {
    400: _refused("The request cannot be served as it is."),
    401: _refused("A known API key is required."),
    404: _refused("No such model."),
    413: _refused("The body is too large."),
    429: _refused("Overloaded, too late, or over a limit of the key; see Retry-After."),
    503: _refused("No worker can serve the request at present."),
}


@functools.cache
def _schema_of(model: type[BaseModel]) -> dict[str, Any]:
    """Return the JSON schema of ``model``. Building the schema takes milliseconds, so callers share
    it, and copy it before they change it."""
    return model.model_json_schema(ref_template=_SCHEMA)


def json_body(model: type[BaseModel], example: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return ``openapi_extra`` of an operation whose request body is a ``model``."""
    shape = {"schema": _schema_of(model)}
    return body({JSON: shape | ({"example": example} if example else {})})


def body(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return ``openapi_extra`` of an operation whose request body has one of these media types."""
    return {"requestBody": {"required": True, "content": content}}


def streamed(answer: type[BaseModel] | None = None) -> dict[str, Any]:
    """Return the OpenAPI response of an operation that streams its answer if the client requests
    that.
    """
    text = "The answer; with `stream: true` server-sent events."
    response = {"description": text, "content": {JSON: {}, "text/event-stream": {}}}
    return response | ({"model": answer} if answer else {})


def made_of_its_id(parameter: str, *operations: tuple[str, str]) -> dict[str, Any]:
    """Return the OpenAPI links of a response with an id, to the operations that take the id as
    ``parameter``.
    """
    links = {}
    for method, path in operations:
        pointer = path.replace("~", "~0").replace("/", "~1")
        links[f"{method} {path}".replace("{", "").replace("}", "").replace("/", "_")] = {
            "operationRef": f"#/paths/{pointer}/{method}",
            "parameters": {parameter: "$response.body#/id"},
        }
    return {"links": links}


def describe(app: FastAPI) -> None:
    """Serve the OpenAPI description of ``app``, with request bodies, keys and error responses
    added.

    The description is built at the first request for it, in a thread, since that takes a tenth of a
    second."""
    lock = asyncio.Lock()
    built = b""

    async def description(_: Request) -> Response:
        nonlocal built
        async with lock:
            built = built or await asyncio.to_thread(_description, app)
        return Response(built, media_type=JSON)

    path = app.openapi_url
    assert path is not None
    app.router.routes[:] = [
        route for route in app.router.routes if getattr(route, "path", "") != path
    ]
    app.add_route(path, description, include_in_schema=False)


def _description(app: FastAPI) -> bytes:
    schema = get_openapi(
        title=app.title,
        version=app.version,
        description=app.description,
        routes=app.routes,
    )
    _add_model(_schema_of(ErrorResponse), schema["components"]["schemas"])
    schema["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in schema["paths"].items():
        for operation in operations.values():
            _name_body(operation, schema["components"]["schemas"])
            _describe_refusals(path, operation)
    return json.dumps(schema).encode()


def _name_body(operation: dict[str, Any], schemas: dict[str, Any]) -> None:
    """Replace the schema in an operation's ``json_body`` by a reference, and add it to the named
    ``schemas``.
    """
    content = operation.get("requestBody", {}).get("content", {}).get(JSON)
    # FastAPI's own schemas are references or unions.
    if content is None or content["schema"].get("type") != "object":
        return
    name = _add_model(content["schema"], schemas)
    content["schema"] = {"$ref": _SCHEMA.format(model=name)}


def _add_model(schema: Mapping[str, Any], schemas: dict[str, Any]) -> str:
    """Add a model's schema and its definitions to the named schemas; return its name."""
    shape = dict(schema)
    schemas.update(shape.pop("$defs", {}))
    name = str(shape["title"])
    schemas[name] = shape
    return name


def _describe_refusals(path: str, operation: dict[str, Any]) -> None:
    """Add the error responses of the gate and the handlers to an operation."""
    shape = {} if is_anthropic(path) else _ERROR
    refusal = {"content": {JSON: {"schema": shape}}}
    responses = operation["responses"]
    # FastAPI adds 422 by itself. This server answers an invalid request with 400.
    responses.pop("422", None)
    responses.setdefault("4XX", {"description": "The request is refused.", **refusal})
    if path in OPEN:
        shown = {"description": "Nothing can be served at present.", "content": {JSON: {}}}
    else:
        operation["security"] = [{"key": []}]
        shown = {"description": "It cannot be served at present, or has failed.", **refusal}
    responses.setdefault("5XX", shown)
    if path in ("/metrics", "/metrics/cluster"):
        responses["200"]["content"] = {"text/plain": {"schema": {"type": "string"}}}
    if path == "/v1/files/{file_id}/content":
        octets = {"type": "string", "format": "binary"}
        responses["200"]["content"] = {"application/octet-stream": {"schema": octets}}
