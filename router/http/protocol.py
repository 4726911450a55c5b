"""uvicorn's HTTP protocol with bounds on heads, unread bodies, and slow clients.

    waiting for a head ─it is complete→ answering
    waiting for a head ─``head_s`` later→ closed (408)
    answering ─answered, the request is read→ waiting for the next head, ``keep_alive_s`` at most
    answering ─answered, the request is not read→ lingering

    any ─the request is not HTTP, or its head is too large→ lingering (400, 431)
    lingering ─the client closes, ``linger_s`` passes, ``LINGER_BYTES`` come→ closed

    answering ─the client sends no more→ answering what it asked→ closed
    answering ─the client sends no more, the answer begins later than ``linger_s``→ aborted

    flowing ─the write buffer is full→ paused ─the client has read it→ flowing
    paused ─fewer than ``SLOW_BYTES`` read in ``slow_client_s``→ aborted
    closed ─what was written is not read in ``slow_client_s``→ aborted

A client that sends no more may have left, which shows only when it is written to.

A lingering connection drops incoming bytes. A socket that is closed with unread bytes is reset, and
the client would lose the answer. A paused connection uses its buffer, which is ``HIGH_WATER_LIMIT``
and one message, and the kernel's buffer. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import sys
import termios
from dataclasses import dataclass
from functools import partial
from http import HTTPStatus
from typing import Any, Protocol, cast

import httptools
import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from baton.liveness.listening import SilenceTimer
from router.access.places import Place
from router.http.uvicorn_internals import HttpToolsProtocol, RequestResponseCycle, ServerState

log = logging.getLogger(__name__)

_NO_LINGER = struct.pack("ii", 1, 0)
SLOW_BYTES = 4096
"""Minimum number of bytes that a client must read in ``slow_client_s``. Otherwise it is
disconnected. An event has about 200 bytes."""
MAX_HEAD_BYTES = 16 << 10
"""Maximum size in bytes of a request's head, and of the data that is parsed in one step."""
MAX_HEADERS = 128
MAX_PIPELINED = 4
"""Maximum number of requests that wait on a connection for the answers to earlier ones."""
LINGER_BYTES = 8 << 20
DIRECT_BODY = "baton.direct_body"
"""Name of the ASGI extension with the ``DirectBody`` of a request's connection."""


def plain_answer(status: int, text: str, *headers: str) -> bytes:
    """Build a whole HTTP response with one line of text, after which the connection closes."""
    body = f"{text}\r\n"
    lines = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        "content-type: text/plain; charset=utf-8",
        f"content-length: {len(body)}",
        *headers,
        "connection: close",
    )
    return ("\r\n".join(lines) + f"\r\n\r\n{body}").encode()


_LATE = plain_answer(408, "The request's head did not arrive in time.")
_TOO_MANY_HEADERS = plain_answer(431, f"The request has more than {MAX_HEADERS} headers.")
_INVALID = plain_answer(400, "Invalid HTTP request received.")
_CODED_1_0 = plain_answer(400, "A request of HTTP/1.0 has no Transfer-Encoding.")
_OTHER_CODING = plain_answer(501, "The only Transfer-Encoding is chunked.")
_NO_TUNNEL = plain_answer(501, "This server is no proxy.")
_OTHER_VERSION = plain_answer(505, "Use HTTP/1.1.")


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the connections of one listener. Times are in seconds."""

    max_connections: int = 4096
    max_per_client: int = 0
    """Maximum number of connections of one client; 0 means no limit."""
    head_s: float = 10.0
    """Timeout in seconds of a TLS handshake, and of receiving a request's head."""
    keep_alive_s: float = 95.0
    """Maximum number of seconds that a connection may be idle between two requests."""
    slow_client_s: float = 30.0
    """Seconds in which a client must read at least ``SLOW_BYTES`` of what was written to it."""
    linger_s: float = 1.0
    """Seconds for which a connection stays open after an answer if the router has not read the
    whole request, and for an answer to a client that sends no more."""

    @property
    def shortest_s(self) -> float:
        """The shortest of all deadlines of a connection, in seconds."""
        return min(self.head_s, self.keep_alive_s, self.slow_client_s, self.linger_s)


class DirectBody(Protocol):
    """Writes parts of a chunked response without waiting: ASGI's ``send`` is a coroutine, which
    takes longer than the write."""

    def hold_next(self) -> None:
        """Write the next data, a response's head, together with the data after it."""

    @property
    def has_room(self) -> bool:
        """Whether the client reads what was written."""

    def write_part(self, part: bytes) -> None:
        """Write a part of the response that has begun, but not the last one. A part for a client
        that has left is dropped."""


class _TooManyRequests(Exception):
    """A client has pipelined more requests than may wait on a connection."""


class _Refused(Exception):
    """The head of a request asks for what this server does not do. ``args``: the answer."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """One HTTP connection with limits on sizes and times. Its ``Place`` enforces the deadlines.

    The parser collects headers of any length, in time quadratic in the length. Without a bound, one
    client could fill the router's memory and block its event loop. The size of bodies is bounded
    where they are read."""

    def __init__(
        self,
        config: uvicorn.Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        place: Place,
        bounds: Bounds,
    ) -> None:
        super().__init__(config, server_state, app_state)
        self._place = place
        self._bounds = bounds
        self._socket: asyncio.Transport | None = None
        """The connection's own transport. uvicorn's attribute ``transport`` is an ``_Outlet``
        instead."""
        self._running: RequestResponseCycle | None = None
        """The request that is being answered, or the last one that was answered."""
        self._in_message = False
        """Whether a request has begun to arrive and is not complete."""
        self._in_head = False
        self._keeps_alive = False
        """Whether the connection may carry another request after the latest one."""
        self._stopping = False
        self._lingered = -1
        """Number of bytes received since the last answer, while the connection lingers; otherwise
        -1."""
        self._progress_timer: SilenceTimer | None = None
        """Timer of the next check whether the client reads the answer; None unless writing is
        paused."""
        self._unfinished = 0
        """Number of bytes received since the parser last completed a head, a part of a body or a
        message."""
        self._parts: list[bytes] = []
        """Parts of a request's body in the latest received data."""
        self._sends_no_more = False
        """Whether the client has closed its side of the connection."""
        self._newest_app, self._old_app = self.app, partial(_answer_without_chunks, self.app)

    # A connection's phases

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self._socket = transport
        super().connection_made(_Outlet(transport, self))
        self._place.cut = transport.abort
        self._place.wait(self._bounds.head_s, self._head_is_late)

    def connection_lost(self, exc: Exception | None) -> None:
        self._lingered = 0
        self._end_checks()
        self._place.release()
        if self._running is not None and not self._running.response_complete:
            # uvicorn notifies only the last request, which may wait behind this one.
            self._running.disconnected = True
            self._running.message_event.set()
        super().connection_lost(exc)
        # Unknown clients may connect by the thousand. Break the reference cycles, so that each
        # connection is freed at once: a run of the garbage collector would block the event loop for
        # a tenth of a second.
        self._socket = self._running = None
        self.cycle = None  # type: ignore[assignment]
        self.pipeline.clear()
        assert isinstance(self.transport, _Outlet), "as connection_made made it"
        self.transport.detach()

    def shutdown(self) -> None:
        self._stopping = True
        super().shutdown()

    def _head_is_late(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_LATE)
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        self._refuse(plain_answer(400, msg))

    def _refuse(self, answer: bytes) -> None:
        """Close the connection, after ``answer`` unless an earlier answer is being written."""
        if self.transport.is_closing():
            return
        if not self._is_answering():
            self.transport.write(answer)
        self.transport.close()

    def eof_received(self) -> bool:  # type: ignore[override]
        if self._running is None or self._running.response_complete or self._in_message:
            return False
        if self._running.response_started or self.scheme == "https":
            return False
        self._sends_no_more = True
        self._place.wait(self._bounds.linger_s, self._end_unless_begun)
        return True

    def _end_unless_begun(self) -> None:
        if self._running is not None and self._running.response_started:
            self._place.work()
        else:
            self.transport.abort()

    def _is_answering(self) -> bool:
        return self._running is not None and not self._running.response_complete

    def on_response_complete(self) -> None:
        if self.pipeline:
            self._running = self.pipeline[-1][0]
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            # Any byte would end uvicorn's own timer, and leave no deadline in its place.
            self.timeout_keep_alive_task.cancel()
            self.timeout_keep_alive_task = None
        if self.transport.is_closing() or self._is_answering():
            return
        if self._sends_no_more:
            self.transport.close()
        elif self._in_head:
            self._place.wait(self._bounds.head_s, self._head_is_late)
        else:
            self._place.wait(self._bounds.keep_alive_s, self.transport.close)

    # Incoming data

    def data_received(self, data: bytes) -> None:
        if self._lingered >= 0:
            self._lingered += len(data)
            if self._lingered > LINGER_BYTES:
                self._close()
            return
        if len(data) <= MAX_HEAD_BYTES:
            self._parse(data)
            return
        for start in range(0, len(data), MAX_HEAD_BYTES):
            if self._lingered >= 0:
                return
            self._parse(data[start : start + MAX_HEAD_BYTES])

    def _parse(self, data: bytes) -> None:
        self._unfinished += len(data)
        try:
            self._feed(data)
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause.args[0] if isinstance(cause, _Refused) else _INVALID)
        self._pass_body()
        if self.transport.is_closing():
            return
        if self._unfinished > MAX_HEAD_BYTES:
            self.send_400_response("The request's head is too large.")
        elif self._in_head and len(self.headers) > MAX_HEADERS:
            self._refuse(_TOO_MANY_HEADERS)

    def _feed(self, data: bytes) -> None:
        """Pass received data to the parser. No ``Upgrade`` is taken, so such a request is answered
        as if it had not offered it (RFC 9110, section 7.8). Raises HttpParserError.

        The parser takes what follows the head of an offer as the other protocol. A new parser gets
        the head again, as the first one read it, without the offer."""
        while True:
            try:
                self.parser.feed_data(data)
            except httptools.HttpParserUpgrade as offer:
                data = self._head_without_offer() + data[offer.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                # As uvicorn sets it: what follows a request with ``Connection: close`` is ignored.
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)
            else:
                return

    def _head_without_offer(self) -> bytes:
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        lines = [b"%b %b HTTP/%b" % (method, self.url, version)]
        lines += [b"%b: %b" % pair for pair in self.headers if pair[0] != b"upgrade"]
        return b"\r\n".join((*lines, b"", b""))

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _TooManyRequests
        super().on_message_begin()
        self._in_message = self._in_head = True
        if self._running is not None and not self._is_answering():
            self._place.wait(self._bounds.head_s, self._head_is_late)

    def on_headers_complete(self) -> None:
        is_old = self._check_head() == "1.0"
        if self.parser.should_upgrade():
            # ``_feed`` parses the head again.
            return
        self._unfinished = 0
        self._in_head = False
        if not self.url.startswith((b"/", b"*")):
            self._take_host(is_old=is_old)
        self.app = self._old_app if is_old else self._newest_app
        super().on_headers_complete()
        self._place.work()
        if not self.pipeline:
            self._running = self.cycle
        # A connection is reused only if the request was fully read when its answer began.
        self._keeps_alive = self.parser.should_keep_alive()
        self.cycle.keep_alive = False
        assert isinstance(self.transport, _Outlet), "as connection_made made it"
        extensions: dict[str, Any] = {} if is_old else {DIRECT_BODY: self.transport}
        self.scope["extensions"] = extensions

    def _check_head(self) -> str:
        """Return the version of HTTP of a request. Raises _Refused for one with another framing of
        bodies than this server has (RFC 9112, sections 2.3 and 6.1)."""
        version: str = self.parser.get_http_version()
        if version not in {"1.0", "1.1"}:
            raise _Refused(_OTHER_VERSION)
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and version == "1.0":
            raise _Refused(_CODED_1_0)
        if codings and (len(codings) > 1 or codings[0].lower() != b"chunked"):
            raise _Refused(_OTHER_CODING)
        if self.parser.get_method() == b"CONNECT":
            raise _Refused(_NO_TUNNEL)
        return version

    def _take_host(self, *, is_old: bool) -> None:
        """Take the host of an absolute request target instead of that of the Host header, which a
        client of HTTP/1.0 may leave out (RFC 9112, section 3.2.2). The target becomes a path."""
        url = httptools.parse_url(self.url)
        host = url.host or b""
        authority = b"[%b]" % host if b":" in host else host
        if url.port:
            authority += b":%d" % url.port
        self.headers[:] = [
            (name, authority if name == b"host" else value) for name, value in self.headers
        ]
        if is_old and all(name != b"host" for name, _ in self.headers):
            self.headers.append((b"host", authority))
        self.url = (url.path or b"/") + (b"?" + url.query if url.query else b"")

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        self._parts.append(body)

    def _pass_body(self) -> None:
        """Pass the received parts of a body to uvicorn in one piece: a body may arrive in chunks of
        one byte.
        """
        if self._parts:
            body = b"".join(self._parts)
            self._parts.clear()
            super().on_body(body)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._pass_body()
        self._unfinished = 0
        self._in_message = False
        if not self.cycle.response_started:
            self.cycle.keep_alive = self._keeps_alive and not self._stopping
        super().on_message_complete()

    # A connection's end

    def end(self) -> None:
        """Close the connection once the client can have read the last answer. uvicorn calls this
        through ``_Outlet``.
        """
        if self._lingered >= 0:
            return
        self._lingered = 0
        assert self._socket is not None, "a connection was made"
        if not self._in_message or self._socket.is_closing():
            self._close()
            return
        self.flow.resume_reading()
        self._place.wait(self._bounds.linger_s, self._close)

    @property
    def is_ending(self) -> bool:
        """Whether the connection is ending, so that no more of an answer may be written."""
        return self._lingered >= 0

    def _close(self) -> None:
        assert self._socket is not None, "a connection was made"
        self._socket.close()
        self._place.wait(self._bounds.slow_client_s, self._socket.abort)

    # A client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_checks()

    def _check_later(self) -> None:
        unread = self._unread()
        self._progress_timer = SilenceTimer(
            self._bounds.slow_client_s, lambda: self._check_progress(unread)
        )

    def _end_checks(self) -> None:
        if self._progress_timer is not None:
            self._progress_timer.cancel()
            self._progress_timer = None

    def _unread(self) -> int:
        """Return the number of written bytes that the client has not read, including those in the
        kernel's buffer.

        The kernel's buffer may hold megabytes, and frees them in large steps. So this process's own
        buffer alone does not show whether a client reads."""
        connection = self.transport.get_extra_info("socket")
        queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _check_progress(self, before: int) -> None:
        if before - self._unread() >= SLOW_BYTES:
            self._check_later()
            return
        log.info("disconnected a client that does not read its answer")
        # Drop both buffers, so that neither the transport nor the kernel keeps unread bytes.
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()


async def _answer_without_chunks(app: ASGIApp, scope: Scope, receive: Receive, send: Send) -> None:
    """Run ``app`` for a client of HTTP/1.0, which knows no chunks: an answer of unknown length ends
    with its connection (RFC 9112, section 6.1)."""
    cycle = cast(RequestResponseCycle, send.__self__)  # type: ignore[attr-defined]
    has_length = True

    async def send_plainly(message: Message) -> None:
        nonlocal has_length
        if message["type"] == "http.response.start":
            headers = list(message.get("headers", ()))
            has_length = any(name.lower() == b"content-length" for name, _ in headers)
            if not has_length:
                cycle.chunked_encoding = cycle.keep_alive = False
            elif cycle.keep_alive:
                message = {**message, "headers": [*headers, (b"connection", b"keep-alive")]}
        elif not has_length:
            cycle.expected_content_length = len(message.get("body", b""))
        await send(message)

    await app(scope, receive, send_plainly)


class _Outlet(asyncio.Transport):
    """The transport that uvicorn sees instead of the connection's own. After uvicorn closes it, the
    client can still read the answer."""

    def __init__(self, transport: asyncio.Transport, protocol: BoundedHttpProtocol) -> None:
        super().__init__()
        self._transport = transport
        self._protocol: BoundedHttpProtocol | None = protocol
        self._holds = False
        self._held = b""

    def detach(self) -> None:
        """Record that the connection is lost, so that no more data can be written."""
        self._protocol = None

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if self._protocol is None or self._protocol.is_ending:
            return
        if self._holds:
            self._holds, self._held = False, bytes(data)
            return
        if self._held:
            data, self._held = self._held + data, b""
        self._transport.write(data)

    def hold_next(self) -> None:
        """See ``DirectBody``."""
        self._holds = True

    @property
    def has_room(self) -> bool:
        """See ``DirectBody``."""
        return self._protocol is None or not self._protocol.flow.write_paused

    def write_part(self, part: bytes) -> None:
        """See ``DirectBody``."""
        self.write(b"%x\r\n%b\r\n" % (len(part), part))

    def close(self) -> None:
        if self._protocol is not None:
            if self._held:
                self.write(b"")
            self._protocol.end()

    def is_closing(self) -> bool:
        lost = self._protocol is None or self._protocol.is_ending
        return lost or self._transport.is_closing()

    def abort(self) -> None:
        self._transport.abort()

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._transport.get_extra_info(name, default)

    def get_write_buffer_size(self) -> int:
        return self._transport.get_write_buffer_size()

    def pause_reading(self) -> None:
        self._transport.pause_reading()

    def resume_reading(self) -> None:
        self._transport.resume_reading()
