"""Server-sent events: their bytes, and the response that streams them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from baton.errors import BatonError
from baton.liveness.listening import listening
from router.http.disconnect import unless_disconnected
from router.http.errors import error_object

log = logging.getLogger(__name__)

DONE = "[DONE]"
_LAST_WORDS_S = 1.0
"""A client that does not read gets this many seconds to take the error event."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # Proxies that buffer would turn a stream into one lump.
    (b"x-accel-buffering", b"no"),
]


def to_json(value: Any) -> str:
    """Compact JSON in ASCII, so that no character can be taken for the end of a line."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def encode_events(payloads: Iterable[str]) -> bytes:
    """Events, each with one line of data; payloads hold no line break."""
    return "".join(f"data: {payload}\n\n" for payload in payloads).encode()


def encode_named(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Events that are named after their ``type``, as newer APIs have them."""
    return "".join(f"event: {one['type']}\ndata: {to_json(one)}\n\n" for one in events).encode()


def error_event(error: BatonError) -> bytes:
    """OpenAI's error object as an event."""
    return encode_events([to_json(error_object(error))])


class EventStream:
    """The sending end. The headers go out with the first event: an error before it has a status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self.started = False
        self.headers: Mapping[str, str] = {}
        """More headers; they go out with the first event."""

    async def send(self, payloads: list[str]) -> None:
        """Send events in one piece; returns when the client's socket has room again."""
        await self.write(encode_events(payloads), more=True)

    async def end(self, payloads: list[str]) -> None:
        """Send the last events and end the response."""
        await self.write(encode_events(payloads), more=False)

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send events that are bytes already; without ``more`` they are the last."""
        async with self._turn:
            if not self.started:
                self.started = True
                await self._send(_start_message(self.headers))
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _start_message(more: Mapping[str, str]) -> Message:
    headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in more.items())]
    return {"type": "http.response.start", "status": 200, "headers": headers}


class EventStreamResponse(Response):
    """Streams what ``work`` sends; a client that leaves cancels it.

    The response raises a BatonError of ``work`` before the first event, so that it is answered with
    its status. A later one becomes ``last_words``, an error event that ends the stream.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        work: Callable[[EventStream], Awaitable[None]],
        last_words: Callable[[BatonError], bytes] = error_event,
    ) -> None:
        super().__init__()
        self._work = work
        self._last_words = last_words

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        events = EventStream(send)
        try:
            await unless_disconnected(receive, self._work(events))
        except BatonError as error:
            if not events.started:
                raise
            await _send_last(events, self._last_words(error))


async def _send_last(events: EventStream, words: bytes) -> None:
    # On a timeout the response stays incomplete, and the server closes the connection.
    with contextlib.suppress(TimeoutError):
        async with listening(_LAST_WORDS_S):
            await events.write(words, more=False)
