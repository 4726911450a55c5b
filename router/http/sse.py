"""Server-sent events: their encoding, and the response that streams them."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from baton.errors import BatonError
from baton.liveness.listening import listening
from router.http.client import unless_disconnected
from router.http.errors import error_object
from router.http.protocol import DIRECT_BODY, DirectBody

log = logging.getLogger(__name__)

DONE = "[DONE]"
_LAST_WORDS_S = 1.0
"""Maximum wait in seconds until a client has received the error event that ends its stream."""
# A proxy that buffers would delay events until the end of the stream.
_HEADERS = {"cache-control": "no-cache", "x-accel-buffering": "no"}


# ``json.dumps`` would make an encoder at each call.
to_json: Callable[[Any], str] = json.JSONEncoder(ensure_ascii=True, separators=(",", ":")).encode
"""Encode a value as compact JSON in ASCII, which contains no line separators."""


def encode_events(payloads: Iterable[str]) -> bytes:
    """Encode each payload as a server-sent event. Payloads must contain no line breaks."""
    return "".join(f"data: {payload}\n\n" for payload in payloads).encode()


def encode_named(events: Iterable[Mapping[str, Any]]) -> bytes:
    """Encode JSON objects as server-sent events, named by their ``type``."""
    return "".join(f"event: {one['type']}\ndata: {to_json(one)}\n\n" for one in events).encode()


def error_event(error: BatonError) -> bytes:
    """Encode OpenAI's error object as a server-sent event."""
    return encode_events([to_json(error_object(error))])


class EventStream(Response):
    """A response that streams the events that ``work`` writes. If the client disconnects, ``work``
    is cancelled.

    Headers go out with the first event. If ``work`` raises a BatonError before that, it is raised
    here, so that the client receives its status. A later BatonError becomes an error event that
    ends the stream; ``last_words`` encodes it."""

    media_type = "text/event-stream"

    def __init__(
        self,
        work: Callable[[EventStream], Awaitable[None]],
        last_words: Callable[[BatonError], bytes] = error_event,
    ) -> None:
        super().__init__(headers=_HEADERS)
        # Starlette has set the length of the empty body.
        del self.headers["content-length"]
        self._work = work
        self._last_words = last_words
        self._turn = asyncio.Lock()
        self._has_begun = False
        self._send: Send | None = None
        self._direct: DirectBody | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._send = send
        self._direct = scope.get("extensions", {}).get(DIRECT_BODY)
        try:
            await unless_disconnected(receive, self._work(self))
        except BatonError as error:
            if not self._has_begun:
                raise
            # After a timeout the response is incomplete, and the server closes the connection.
            with contextlib.suppress(TimeoutError):
                async with listening(_LAST_WORDS_S):
                    await self.write(self._last_words(error), more=False)

    async def write(self, body: bytes, *, more: bool) -> None:
        """Send encoded events to the client. If ``more`` is false, they end the response.

        Returns once the client's socket has room again."""
        assert self._send is not None, "the response has not been called"
        async with self._turn:
            if not self._has_begun:
                self._has_begun = True
                if self._direct is not None:
                    self._direct.hold_next()
                start = {"status": self.status_code, "headers": self.raw_headers}
                await self._send({"type": "http.response.start", **start})
            await self._send({"type": "http.response.body", "body": body, "more_body": more})

    @property
    def has_room(self) -> bool:
        """Whether ``write_now`` may be called: the response has begun, and the client's socket has
        room."""
        return self._has_begun and self._direct is not None and self._direct.has_room

    def write_now(self, body: bytes) -> None:
        """Send encoded events to the client without waiting. They do not end the response."""
        assert self._direct is not None, "has_room was not checked"
        self._direct.write_part(body)
