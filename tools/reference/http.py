"""Makes docs/reference/http.md from the router's OpenAPI description and its table of scopes."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any
from unittest.mock import MagicMock

import httpx
from prometheus_client import CollectorRegistry

from baton.config.cluster import Config
from baton.telemetry.metrics import RouterMetrics
from router.access.access import Access, scope_of_path
from router.app import make_application
from router.core.accounting import RequestStats
from router.core.served_model import ServedModel
from router.http.openapi import ERRORS
from router.inference.service import InferenceService
from tools.reference.markdown import cell, code, made_from, table, text

_HEAD = f"""# HTTP endpoints

All endpoints of a router with their parameters, request bodies and answers. [Chat, completions
and embeddings](http-api.md) describes these three APIs field by field, with examples and the
differences from OpenAI. A running router serves the same description at `/openapi.json`.

- **Address**: [`http`](configuration.md#http). With an
  [`admin_http`](configuration.md#admin_http), endpoints of the scopes `metrics` and `admin` are
  there alone.
- **Key**: `Authorization: Bearer KEY`, where a key is required. A key must have the scope of the
  endpoint; "open" endpoints need none.
- **Deadline**: the header `x-baton-deadline-ms` bounds a request that generates tokens.
- **Null** is the default of every field that may be null.
- **Status**: 200, or one of the statuses below. [Error codes](errors.md) lists the codes in the
  body and what to do.

{made_from("the OpenAPI description and the scopes of the router")}
"""
_GROUPS = {
    "openai": "OpenAI's API",
    "anthropic": "Anthropic's API",
    "native": "Generate",
    "tokens": "Tokens and model",
    "usage": "Usage and feedback",
    "batches": "Files and batches",
    "cache": "Prefix cache",
    "operations": "Operations",
}
"""Titles of the page's groups of endpoints, in the order of the page. The keys are the tags of
endpoints in the OpenAPI description."""
_OTHERS = "Other endpoints"
_BOUNDS = {
    "minimum": "at least {}",
    "exclusiveMinimum": "above {}",
    "maximum": "at most {}",
    "exclusiveMaximum": "below {}",
    "minLength": "at least {} characters",
    "maxLength": "at most {} characters",
    "minItems": "at least {} items",
    "maxItems": "at most {} items",
    "maxProperties": "at most {} entries",
}
_PLAIN = ("string", "integer", "number", "boolean", "object")
_DEFAULT = re.compile(r"\s*Default (-?[\w.]+?)\.$")
_UNNAMED = ("Successful Response", "The request is refused.")


def reference() -> str:
    """Return the Markdown text of the page on the HTTP API."""
    description = asyncio.run(_description())
    schemas = description["components"]["schemas"]
    groups: dict[str, list[tuple[str, str, Any]]] = {title: [] for title in _GROUPS.values()}
    for path, operations in description["paths"].items():
        for method, operation in operations.items():
            (tag,) = operation.get("tags") or [""]
            title = _GROUPS.get(tag, _OTHERS)
            groups.setdefault(title, []).append((method.upper(), path, operation))
    statuses = ((str(status), cell(one["description"])) for status, one in ERRORS.items())
    parts = [_HEAD, f"\n{table(('status', 'meaning'), statuses)}\n", "\n## Overview\n"]
    found = {title: group for title, group in groups.items() if group}
    rows = (
        (_heading_link(method, path), _scope(path), cell(_lead(operation)))
        for group in found.values()
        for method, path, operation in group
    )
    parts.append(f"\n{table(('endpoint', 'scope', 'what it does'), rows)}\n")
    objects: list[str] = []
    for title, group in found.items():
        parts.append(f"\n## {title}\n")
        parts += (_endpoint(*one, schemas, objects) for one in group)
    parts.append("\n## Objects\n\nObjects within request bodies.\n")
    # Objects within objects are noted while their tables are made.
    for name in objects:
        parts.append(f"\n### {name}\n\n{_fields(schemas[name], schemas, objects)}\n")
    return "".join(parts)


async def _description() -> dict[str, Any]:
    """Return the OpenAPI description that a router serves. It is made from a router whose parts
    that answer requests are replaced by stand-ins."""
    config = Config(cluster_id="reference")
    stats = RequestStats(RouterMetrics(CollectorRegistry()))
    absent: Any = MagicMock()
    model = ServedModel(id="MODEL", created=0, context_length=0, embedding_size=0)
    access = Access(config, stats.metrics)
    service = InferenceService(absent, absent, model, stats, config, access)
    made = make_application(absent, service, stats, absent, config.cluster_id)
    transport = httpx.ASGITransport(made.apps.http)
    async with httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1") as client:
        found: dict[str, Any] = (await client.get("/openapi.json")).json()
    return found


def _heading(method: str, path: str) -> str:
    return f"{method} {path}"


def _heading_link(method: str, path: str) -> str:
    return f"[{code(_heading(method, path))}](#{_place(method, path)})"


def _place(method: str, path: str) -> str:
    """Return the anchor that Markdown renderers give an endpoint's heading."""
    return f"{method.lower()}-" + re.sub(r"[^\w-]", "", path.lower())


def _scope(path: str) -> str:
    scope = scope_of_path(path)
    return "open" if scope is None else code(scope)


def _about(operation: Mapping[str, Any]) -> str:
    """Return an endpoint's description without its scope, which the page shows separately."""
    about = str(operation.get("description", ""))
    return re.sub(r"\s*Requires a key with scope \w+\.", "", about)


def _lead(operation: Mapping[str, Any]) -> str:
    return _about(operation).partition("\n\n")[0]


def _endpoint(
    method: str,
    path: str,
    operation: Mapping[str, Any],
    schemas: Mapping[str, Any],
    objects: list[str],
) -> str:
    parts = [f"\n### {code(_heading(method, path))}\n"]
    for paragraph in _about(operation).split("\n\n"):
        parts.append(f"\n{text(paragraph)}\n")
    parts.append(f"\nScope of the key: {_scope(path)}.\n")
    parameters = [
        (
            code(one["name"]),
            one["in"],
            _type(one["schema"], schemas, objects),
            "required" if one.get("required") else _default(one["schema"]),
            cell(one.get("description") or one["schema"].get("description", "")),
        )
        for one in operation.get("parameters", ())
    ]
    if parameters:
        head = ("parameter", "in", "type", "default", "meaning")
        parts.append(f"\n{table(head, parameters)}\n")
    for kind, body in operation.get("requestBody", {}).get("content", {}).items():
        parts.append(f"\nThe body is `{kind}`:\n\n{_fields(body['schema'], schemas, objects)}\n")
    answer = operation["responses"].get("200", {})
    parts.append(f"\n{' '.join(_answer(answer, schemas))}\n")
    return "".join(parts)


def _answer(answer: Mapping[str, Any], schemas: Mapping[str, Any]) -> Iterator[str]:
    described = str(answer.get("description", ""))
    kinds = list(answer.get("content", {}))
    yield f"Answer: {' or '.join(map(code, kinds))}." if kinds else "Answer: no body."
    if described not in _UNNAMED:
        yield text(described)
    for content in answer.get("content", {}).values():
        names = _resolved(content.get("schema", {}), schemas).get("properties", {})
        if names:
            yield f"Fields: {', '.join(map(code, names))}."
            return


def _resolved(schema: Mapping[str, Any], schemas: Mapping[str, Any]) -> Mapping[str, Any]:
    if "$ref" in schema:
        found: Mapping[str, Any] = schemas[_name(schema)]
        return found
    return schema


def _name(schema: Mapping[str, Any]) -> str:
    return str(schema["$ref"]).rpartition("/")[2]


def _fields(schema: Mapping[str, Any], schemas: Mapping[str, Any], objects: list[str]) -> str:
    shape = _resolved(schema, schemas)
    needed = shape.get("required", ())
    rows = [
        (
            code(name),
            _type(one, schemas, objects),
            "required" if name in needed else _default(one),
            cell(_DEFAULT.sub("", one.get("description", ""))),
        )
        for name, one in shape.get("properties", {}).items()
    ]
    return table(("field", "type", "default", "meaning"), rows) if rows else "Any object."


def _type(schema: Mapping[str, Any], schemas: Mapping[str, Any], objects: list[str]) -> str:
    """Return a JSON schema's type in plain words, with its bounds. Objects to which the schema
    refers are added to ``objects``."""
    if "$ref" in schema:
        name = _name(schema)
        target = schemas[name]
        if "properties" not in target:
            return _type(target, schemas, objects)
        if name not in objects:
            objects.append(name)
        return f"[{name}](#{name.lower()})"
    for several in ("anyOf", "oneOf"):
        if several in schema:
            kinds = [one for one in schema[several] if one.get("type") != "null"]
            return " or ".join(dict.fromkeys(_type(one, schemas, objects) for one in kinds))
    if "enum" in schema or "const" in schema:
        choices = schema.get("enum", [schema.get("const")])
        return ", ".join(code(one) for one in choices if one is not None)
    named = schema.get("type", "any")
    several_types = named if isinstance(named, list) else [named]
    kind = " or ".join(one for one in several_types if one != "null")
    if kind == "array":
        entry = _type(schema.get("items", {}), schemas, objects)
        kind = f"list of {entry}s" if entry in _PLAIN else f"list of {entry}"
    if schema.get("format") == "binary":
        kind = "file"
    bounds = [words.format(schema[name]) for name, words in _BOUNDS.items() if name in schema]
    return ", ".join([kind, *bounds])


def _default(schema: Mapping[str, Any]) -> str:
    value = schema.get("default")
    if value is None:
        # Where null is the default, the description has what it stands for.
        described = _DEFAULT.search(schema.get("description", ""))
        return code(described[1]) if described else ""
    return code(str(value).lower() if isinstance(value, bool) else value)
