"""Reads from HTTP clients: a bounded JSON body, and whether the client has disconnected."""

from __future__ import annotations

import asyncio
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt
import pydantic_core
from fastapi import Request
from pydantic import BeforeValidator, Field
from starlette.types import Receive

from baton.errors import InvalidRequest, RequestTooLarge
from baton.host.turns import FairTurns
from baton.liveness.listening import listening
from router.access.api_keys import Caller

SMALL_BYTES = 64 << 10
"""Maximum size of a small body. Parsing it blocks the event loop for a few milliseconds, whatever
it contains."""
LARGE_BYTES = 256 << 10
"""Size above which request bodies take turns, fairly among tenants."""
LARGE_AT_ONCE = 8
"""Maximum number of large request bodies that are processed at a time. Processing lasts from their
arrival until their token ids are known."""
LARGE_BODY_S = 30.0
"""Timeout in seconds for receiving the rest of a large body after it has got its turn."""
MAX_CONTAINERS = 32_768
"""Maximum number of JSON objects and lists in one body."""
MAX_STRINGS = 65_536
"""Maximum number of JSON strings in one body, including the keys of objects."""
MAX_VALUES = 327_680
"""Maximum number of JSON values in one body, unless the model's context is longer. OpenAI embeds
300,000 tokens."""
MAX_LISTS = 2048
"""Maximum number of lists of token ids in one body; each API bounds its prompts further."""
COUNTED_BYTES = 64 << 10
"""Number of bytes whose JSON values are counted before control returns to the event loop."""
_COUNTED = ("objects and lists", "strings", "values")
_QUOTE, _COMMA, _BRACKET, _BACKSLASH, _BRACE = b'",[\\{'
T = TypeVar("T")


class ClientGone(Exception):
    """The client has disconnected, so no answer can be sent."""


def caller_of(request: Request) -> Caller:
    """Return the caller of a request that passed the gate."""
    caller: Caller = request.scope["state"]["caller"]
    return caller


async def read_object(request: Request, limit: int, deadline_s: float) -> dict[str, Any]:
    """Read a small request body. It must be a JSON object of at most ``limit`` bytes and at most
    ``SMALL_BYTES``.

    Raises RequestTooLarge as early as possible, InvalidRequest, and
    ``starlette.requests.ClientDisconnect``."""
    limit = min(limit, SMALL_BYTES)
    _check_headers(request, limit)
    arriving = _Arriving(request, limit)
    await arriving.beyond(limit, deadline_s)
    return parse_object(arriving.take())


class BodyReader:
    """Reads request bodies that are JSON objects. Owned by the event loop.

    arriving ─``SMALL_BYTES``→ its values are counted, part by part, before any of it is parsed
    arriving ─``LARGE_BYTES``→ waiting for a turn ─its tenant has one→ arriving, in ``LARGE_BODY_S``

    So neither a body of millions of values nor many large bodies block the event loop, and large
    bodies use at most ``LARGE_AT_ONCE`` times ``max_bytes`` of memory.
    """

    def __init__(self, max_bytes: int, deadline_s: float, context_length: int) -> None:
        """Create a reader of request bodies of at most ``max_bytes`` bytes.

        ``deadline_s``: maximum seconds until a body has arrived. ``context_length``: the model's
        context, which bounds the number of token ids in a body."""
        self._max_bytes = max_bytes
        self._deadline_s = deadline_s
        self._context_length = context_length
        self._turns = FairTurns("large bodies", LARGE_AT_ONCE)

    @asynccontextmanager
    async def object(
        self, request: Request, tenant: str, check: Callable[[bytes], None] = lambda _: None
    ) -> AsyncIterator[dict[str, Any]]:
        """Read a request's body and yield the object in it. ``check`` gets its first
        ``SMALL_BYTES``, or a few more, before any of it is parsed.

        A large body holds its turn until the block ends. The block must create the prompt's token
        ids. Raises RequestTooLarge as early as possible, InvalidRequest, Overloaded, and
        ``starlette.requests.ClientDisconnect``."""
        _check_headers(request, self._max_bytes)
        arriving = _Arriving(request, self._max_bytes)
        await arriving.beyond(SMALL_BYTES, self._deadline_s)
        check(arriving.begin())
        if arriving.ended:
            yield parse_object(arriving.take())
            return
        counts = ValueCount(self._context_length)
        await arriving.beyond(LARGE_BYTES, self._deadline_s, counts)
        async with AsyncExitStack() as turn:
            if not arriving.ended:
                await turn.enter_async_context(self._turns.turn(tenant))
                left_s = min(LARGE_BODY_S, self._deadline_s)
                await arriving.beyond(self._max_bytes, left_s, counts)
            value = parse_object(arriving.take())
            # Yield to the event loop between the parsing and the caller's work.
            await asyncio.sleep(0)
            yield value


def parse_object(body: bytes) -> dict[str, Any]:
    """Parse a request body, whose size or number of values must already be bounded. A byte order
    mark in front is skipped, as RFC 8259 allows. Raises InvalidRequest.
    """
    try:
        value = pydantic_core.from_json(body.removeprefix(BOM_UTF8), allow_inf_nan=False)
    except ValueError as error:
        raise InvalidRequest(f"the body is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


class ValueCount:
    """Counts the values of a JSON text as it arrives, without parsing it.

    If the text is not JSON, the counts mean nothing, and parsing fails later.
    """

    def __init__(self, context_length: int) -> None:
        self._counted = 0
        """Number of parts of the body whose values were counted."""
        self._max = (MAX_CONTAINERS, MAX_STRINGS, max(MAX_VALUES, context_length + MAX_CONTAINERS))
        self._found = np.zeros(3, np.int64)
        """How many objects and lists, how many strings, and how many commas were found so far."""
        self._in_string = False
        self._backslashes = 0
        """Number of backslashes at the end of the text that was counted last."""

    async def add(self, parts: Sequence[bytes]) -> None:
        """Count the values in ``parts``, all parts of the body so far, except those counted
        earlier. Raises InvalidRequest that names the exceeded bound."""
        for part in parts[self._counted :]:
            for begin in range(0, len(part), COUNTED_BYTES):
                self.feed(part[begin : begin + COUNTED_BYTES])
                await asyncio.sleep(0)
        self._counted = len(parts)

    def feed(self, text: bytes) -> None:
        """Count the values in further bytes of the body. Raises InvalidRequest, naming the exceeded
        bound.
        """
        characters = np.frombuffer(text, np.uint8)
        quotes = characters == _QUOTE
        if self._backslashes or b"\\" in text:
            quotes &= ~self._escaped(characters)
        inside = np.logical_xor.accumulate(quotes) ^ self._in_string
        outside = characters[~inside]
        containers = np.count_nonzero((outside == _BRACKET) | (outside == _BRACE))
        # A string's last quote counts as outside here.
        strings = np.count_nonzero(outside == _QUOTE)
        self._found += (containers, strings, np.count_nonzero(outside == _COMMA))
        self._in_string = bool(inside[-1])
        for found, limit, what in zip(self._found, self._max, _COUNTED, strict=True):
            if found > limit:
                raise InvalidRequest(f"the body has more than {limit} {what}")

    def _escaped(self, characters: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
        """Return, for each character, whether an odd number of backslashes stands before it."""
        places = np.arange(len(characters), dtype=np.int32)
        before = np.int32(-1 - self._backslashes)
        others = np.where(characters == _BACKSLASH, before, places)
        last_other = np.maximum.accumulate(others)
        self._backslashes = int(places[-1] - last_other[-1])
        previous = np.concatenate((np.array([before]), last_other[:-1]))
        is_odd: npt.NDArray[np.bool_] = (places - 1 - previous) % 2 == 1
        return is_odd


def _check_headers(request: Request, limit: int) -> None:
    kind = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    # A page of another site may send other types to a server on loopback without a preflight.
    if kind != "application/json" and not kind.endswith("+json"):
        raise InvalidRequest("the Content-Type must be application/json")
    length = request.headers.get("content-length", "0")
    if len(length) > 18 or (length.isdecimal() and int(length) > limit):
        raise _too_large(limit)


class _Arriving:
    """A request body whose parts are arriving."""

    def __init__(self, request: Request, limit: int) -> None:
        """Create a reader of the body of ``request``; ``limit`` is its maximum size in bytes."""
        self._stream = request.stream()
        self._limit = limit
        self._size = 0
        self._parts: list[bytes] = []
        self.ended = False

    async def beyond(self, size: int, deadline_s: float, counts: ValueCount | None = None) -> None:
        """Read until the body ends or has more than ``size`` bytes. If ``counts`` is given, it
        counts the body's values meanwhile.

        Raises InvalidRequest, RequestTooLarge."""
        try:
            async with listening(deadline_s):
                while not self.ended and self._size <= size:
                    await self._next()
                    if counts is not None:
                        await counts.add(self._parts)
        except TimeoutError:
            raise InvalidRequest("the body did not arrive in time") from None

    async def _next(self) -> None:
        part = await anext(self._stream, None)
        if part is None:
            self.ended = True
            return
        self._size += len(part)
        if self._size > self._limit:
            raise _too_large(self._limit)
        self._parts.append(part)

    def begin(self) -> bytes:
        """Return the bytes of the body that have arrived."""
        self._parts = [b"".join(self._parts)]
        return self._parts[0]

    def take(self) -> bytes:
        """Return the bytes of the body that have arrived, and drop them from this object."""
        parts, self._parts = self._parts, []
        return b"".join(parts)


def _too_large(limit: int) -> RequestTooLarge:
    return RequestTooLarge(f"the body is larger than {limit} bytes")


async def unless_disconnected(receive: Receive, work: Awaitable[T]) -> T:
    """Await ``work`` in the caller's task. Cancel ``work`` when the client disconnects.

    The request's body must have been read. Raises ClientGone if the client disconnects, and any
    error of ``work``, after ``work`` has ended and cleaned up."""
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
    """Convert a float without a fraction to an integer: JSON has one type of number, so 16.0 is an
    integer.
    """
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _integrals(values: Any) -> Any:
    """Apply ``_integral`` to each item of a list. If all items are integers, no call per item is
    made.
    """
    if isinstance(values, list) and float in set(map(type, values)):
        return [_integral(value) for value in values]
    return values


Int = Annotated[int, BeforeValidator(_integral)]
# Some clients of completions send false for none.
Count = Annotated[
    int | None,
    BeforeValidator(
        lambda v: None if v is False else _integral(v),
        json_schema_input_type=int | Literal[False] | None,
    ),
]
# Validation stops at the first bad item. A body of a million bad items would otherwise make a
# million error objects.
Strings = Annotated[list[str], Field(fail_fast=True)]
Ints = Annotated[list[int], Field(fail_fast=True), BeforeValidator(_integrals)]
IntLists = Annotated[list[Ints], Field(fail_fast=True, max_length=MAX_LISTS)]
