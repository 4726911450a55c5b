"""What handlers learn from an HTTP client: its JSON body, bounded, and its disconnect."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Annotated, Any, Literal, TypeVar

import pydantic_core
from fastapi import Request
from pydantic import BaseModel, BeforeValidator, Field, ValidationError
from starlette.types import Receive

from baton.errors import InvalidRequest, RequestTooLarge
from baton.liveness.listening import listening
from router.access.api_keys import Caller
from router.http.errors import from_validation

T = TypeVar("T")
Body = TypeVar("Body", bound=BaseModel)


class ClientGone(Exception):
    """The client has disconnected; there is no one to answer."""


def caller_of(request: Request) -> Caller:
    """The caller of a request that the gate has let in, and counted if its key has limits."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


async def read_object(request: Request, limit: int, deadline_s: float) -> dict[str, Any]:
    """Read a body that is a JSON object of at most ``limit`` bytes.

    Raises RequestTooLarge as early as possible, InvalidRequest, and
    ``starlette.requests.ClientDisconnect``.
    """
    _check_headers(request, limit)
    try:
        async with listening(deadline_s):
            body = await _read(request, limit)
    except TimeoutError:
        raise InvalidRequest("the body did not arrive in time") from None
    try:
        value = pydantic_core.from_json(body, allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def validate(model: type[Body], value: dict[str, Any]) -> Body:
    """Validate an object. Raises InvalidRequest with the name of the first bad field."""
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise from_validation(error) from None


def _check_headers(request: Request, limit: int) -> None:
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    # A page of another site may send other types to a server on loopback without a preflight.
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest("the Content-Type must be application/json")
    length = request.headers.get("content-length", "0")
    if len(length) > 18 or (length.isdecimal() and int(length) > limit):
        raise _too_large(limit)


async def _read(request: Request, limit: int) -> bytes:
    chunks: list[bytes] = []
    size = 0
    async for chunk in request.stream():
        size += len(chunk)
        if size > limit:
            raise _too_large(limit)
        chunks.append(chunk)
    return b"".join(chunks)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {limit} bytes")


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work``, in the caller's task. It is cancelled when the client disconnects.

    The request's body must have been read. Raises ClientGone, and all that ``work`` raises, after
    ``work`` has ended and cleaned up.
    """
    worker = asyncio.current_task()
    assert worker is not None, "not in a task"
    is_gone = False

    async def watch() -> None:
        nonlocal is_gone
        while (await receive())["type"] != "http.disconnect":
            pass
        is_gone = True
        worker.cancel()

    watcher = asyncio.create_task(watch(), name="disconnect")
    try:
        return await work
    except asyncio.CancelledError:
        # A cancellation from elsewhere, such as the server's, continues.
        if is_gone and not worker.uncancel():
            raise ClientGone from None
        raise
    finally:
        watcher.cancel()


def _integral(value: Any) -> Any:
    """JSON knows one kind of number: 16.0 is an integer."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Int = Annotated[int, BeforeValidator(_integral)]
# Some clients of completions send false where they want none.
Count = Annotated[
    int | None,
    BeforeValidator(
        lambda v: None if v is False else _integral(v),
        json_schema_input_type=int | Literal[False] | None,
    ),
]
# Lists stop at the first bad item: a body of a million bad ones would be a million error objects.
Strings = Annotated[list[str], Field(fail_fast=True)]
Ints = Annotated[list[Int], Field(fail_fast=True)]
