"""HTTP responses of errors, in the shape that clients of a path expect: OpenAI's or Anthropic's."""

from __future__ import annotations

import math
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Match

from baton.errors import (
    BatonError,
    InvalidRequest,
    RateLimitExceeded,
    Unauthenticated,
    UnsupportedEncoding,
)

_ONE_OF = {
    "prompt": "must be a string, a list of strings, a list of token ids or a list of such lists",
    "stop": "must be a string or a list of strings",
    "input": "must be a string or a list of items",
    "system": "must be a string or a list of text blocks",
    "content": "must be a string or a list of text parts",
}

_MAX_NAMED = 8
"""Maximum number of fields that one error names."""
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    415: "invalid_request_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}


def error_object(error: BatonError) -> dict[str, Any]:
    """Return an error as OpenAI's error object."""
    return _object(error.message, error.error_type, error.param, error.code)


def anthropic_error(error: BatonError) -> dict[str, Any]:
    """Return an error as Anthropic's error object."""
    kind = _ANTHROPIC_TYPES.get(error.http_status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def is_anthropic(path: str) -> bool:
    """Return whether clients of ``path`` expect errors in Anthropic's format."""
    return path.startswith("/v1/messages")


def internal_error(error: Exception) -> BatonError:
    """Return the error that clients receive for an exception that is not a BatonError."""
    return BatonError(f"internal error: {type(error).__name__}")


def error_response(error: BatonError, path: str) -> Response:
    """Build the response to a request for ``path`` that failed before its response began."""
    headers = {}
    if error.retry_after is not None or error.http_status in (429, 503):
        headers["retry-after"] = str(max(1, math.ceil(error.retry_after or 0)))
    if error.retry_after is not None:
        # OpenAI's clients prefer this header to whole seconds.
        headers["retry-after-ms"] = str(math.ceil(error.retry_after * 1000))
    if isinstance(error, RateLimitExceeded):
        headers |= error.facts
    if isinstance(error, UnsupportedEncoding):
        # The encodings of a body that are taken (RFC 9110, section 12.5.3).
        headers["accept-encoding"] = "identity"
    if isinstance(error, Unauthenticated):
        headers["www-authenticate"] = "Bearer"
    shape = anthropic_error if is_anthropic(path) else error_object
    return JSONResponse(shape(error), error.http_status, headers)


def from_validation(error: ValidationError) -> InvalidRequest:
    """Convert the first error of each field of a request body. The message does not repeat what
    the client sent.
    """
    firsts: dict[str | int, InvalidRequest] = {}
    for one in error.errors(include_url=False, include_context=False, include_input=False):
        field = one["loc"][0] if one["loc"] else ""
        if field not in firsts and len(firsts) < _MAX_NAMED:
            firsts[field] = _invalid(one["loc"], one["msg"], missing=one["type"] == "missing")
    told = list(firsts.values())
    return InvalidRequest(". ".join(one.message for one in told), param=told[0].param)


def _invalid(location: tuple[str | int, ...], reason: str, *, missing: bool) -> InvalidRequest:
    reason = reason[:1].lower() + reason[1:]
    place = next((place for place, part in enumerate(location) if part in _ONE_OF), None)
    if place is not None:
        reason = _ONE_OF[str(location[place])]
        location = location[: place + 1]
    path = ""
    for part in location:
        path += f"[{part}]" if isinstance(part, int) else f".{part}" if path else part
    if missing:
        return InvalidRequest(f"{path} is required", param=path)
    return InvalidRequest(f"{path}: {reason}" if path else reason, param=path or None)


def _object(message: str, kind: str, param: str | None, code: str | None) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


async def _on_baton_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, BatonError)
    return error_response(error, request.scope["path"])


async def _on_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    status = error.status_code
    messages = {
        404: ("there is no such path", "unknown_url"),
        405: ("this path does not take this method", "method_not_allowed"),
    }
    message, code = messages.get(status, (HTTPStatus(status).phrase, None))
    kind = "server_error" if status >= 500 else "invalid_request_error"
    headers = dict(error.headers or {})
    if status == 405:
        headers["Allow"] = _allowed(request)
    return JSONResponse(_object(message, kind, None, code), status, headers)


def _allowed(request: Request) -> str:
    """Return the value of the Allow header for the path of a request (RFC 9110, 15.5.6). Starlette
    only lists the methods of one route."""
    routes: list[BaseRoute] = request.app.routes
    matching = (route for route in routes if route.matches(request.scope)[0] is not Match.NONE)
    methods = {name for one in matching for name in getattr(one, "methods", ())}
    return ", ".join(sorted(methods | ({"HEAD"} if "GET" in methods else set())))


async def _on_validation_error(request: Request, error: Exception) -> Response:
    return error_response(InvalidRequest("the request is not valid"), request.scope["path"])


async def _on_unexpected(request: Request, error: Exception) -> Response:
    return error_response(internal_error(error), request.scope["path"])


def add_error_handlers(app: FastAPI) -> None:
    """Answer every error of ``app`` with an error object."""
    app.add_exception_handler(BatonError, _on_baton_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(RequestValidationError, _on_validation_error)
    # The gate logs the error, which Starlette raises once it has answered.
    app.add_exception_handler(Exception, _on_unexpected)
