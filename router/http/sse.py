"""Server-sent events: their encoding, and the response that streams them."""

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
from router.http.client import unless_disconnected
from router.http.errors import error_object

log = logging.getLogger(__name__)

DONE = "[DONE]"
_LAST_WORDS_S = 1.0
"""Maximum wait for a client to take the error event, seconds."""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    # A proxy that buffers would delay events until the end of the stream.
    (b"x-accel-buffering", b"no"),
]


def to_json(value: Any) -> str:
    """Compact JSON in ASCII: no character of it can be a line separator."""
    return json.dumps(value, ensure_ascii=True, separators=(",", ":"))


def encode_events(payloads: Iterable[str]) -> bytes:
    """Encode events. Payloads hold no line breaks."""
    return "".join(f"data: {payload}\n\n" for payload in payloads).encode()


def encode_named(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode events that are named by their ``type``."""
    return "".join(f"event: {one['type']}\ndata: {to_json(one)}\n\n" for one in events).encode()


def error_event(error: BatonError) -> bytes:
    """Encode OpenAI's error object as an event."""
    return encode_events([to_json(error_object(error))])


class EventStream:
    """Sends events. Headers go out with the first one, so an earlier error can set the status."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._turn = asyncio.Lock()
        self.started = False
        self._headers: dict[str, str] = {}

    def add_headers(self, headers: Mapping[str, str]) -> None:
        """Add headers, which go out with the first event."""
        self._headers.update(headers)

    async def send(self, payloads: list[str]) -> None:
        """Send events at once. Returns when the client's socket has room again."""
        await self.write(encode_events(payloads), more=True)

    async def end(self, payloads: list[str]) -> None:
        """Send the last events and end the response."""
        await self.write(encode_events(payloads), more=False)

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send encoded events. Without ``more`` they end the response."""
        async with self._turn:
            if not self.started:
                self.started = True
                await self._send(_start_message(self._headers))
            await self._send({"type": "http.response.body", "body": body, "more_body": more})


def _start_message(more: Mapping[str, str]) -> Message:
    headers = [*_HEADERS, *((name.encode(), value.encode()) for name, value in more.items())]
    return {"type": "http.response.start", "status": 200, "headers": headers}


class EventStreamResponse(Response):
    """Streams the events that ``work`` sends. A client that disconnects cancels it.

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
    # After a timeout the response is incomplete, and the server closes the connection.
    with contextlib.suppress(TimeoutError):
        async with listening(_LAST_WORDS_S):
            await events.write(words, more=False)
