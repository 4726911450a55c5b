"""uvicorn's HTTP protocol with bounds on heads, unread bodies, and slow clients.

    waiting for a head ─it is complete→ answering
    waiting for a head ─``head_s`` later→ closed (408)
    answering ─answered, the request is read→ waiting for the next head, ``keep_alive_s`` at most
    answering ─answered, the request is not read→ lingering

    any ─the request is not HTTP, or its head is too large→ lingering (400, 431)
    lingering ─the client closes, ``linger_s`` passes, ``LINGER_BYTES`` come→ closed

    flowing ─the write buffer is full→ paused ─the client has read it→ flowing
    paused ─fewer than ``SLOW_BYTES`` read in ``slow_client_s``→ aborted
    closed ─what was written is not read in ``slow_client_s``→ aborted

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
from http import HTTPStatus
from typing import Any, Protocol

import httptools
import uvicorn

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


@dataclass(frozen=True, slots=True)
class Bounds:
    """Limits on the connections of one listener. Times are in seconds."""

    max_connections: int = 4096
    max_per_client: int = 0
    """Maximum number of connections of one client; 0 means no limit."""
    head_s: float = 10.0
    """Timeout in seconds of a TLS handshake, and of receiving a request's head."""
    keep_alive_s: float = 5.0
    """Maximum number of seconds that a connection may be idle between two requests."""
    slow_client_s: float = 30.0
    """Seconds in which a client must read at least ``SLOW_BYTES`` of what was written to it."""
    linger_s: float = 1.0
    """Seconds for which a connection stays open after an answer if the router has not read the
    whole request."""

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
        if not self.transport.is_closing():
            super().send_400_response(msg)

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
        if self._in_head:
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
        super().data_received(data)
        self._pass_body()
        if self.transport.is_closing():
            return
        if self._unfinished > MAX_HEAD_BYTES:
            self.send_400_response("The request's head is too large.")
        elif self._in_head and len(self.headers) > MAX_HEADERS:
            self.transport.write(_TOO_MANY_HEADERS)
            self.transport.close()

    def on_message_begin(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            raise _TooManyRequests
        super().on_message_begin()
        self._in_message = self._in_head = True
        if self._running is not None and not self._is_answering():
            self._place.wait(self._bounds.head_s, self._head_is_late)

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        self._in_head = False
        if not self.url.startswith((b"/", b"*")):
            self._take_host(self.url)
        super().on_headers_complete()
        self._place.work()
        if not self.pipeline:
            self._running = self.cycle
        # A connection is reused only if the request was fully read when its answer began.
        self._keeps_alive = self.cycle.keep_alive
        self.cycle.keep_alive = False
        assert isinstance(self.transport, _Outlet), "as connection_made made it"
        extensions: dict[str, Any] = {DIRECT_BODY: self.transport}
        self.scope["extensions"] = extensions

    def _take_host(self, target: bytes) -> None:
        """Take the host of an absolute request target instead of that of the Host header (RFC 9112,
        section 3.2.2)."""
        url = httptools.parse_url(target)
        host = url.host or b""
        authority = b"[%b]" % host if b":" in host else host
        if url.port:
            authority += b":%d" % url.port
        self.headers[:] = [
            (name, authority if name == b"host" else value) for name, value in self.headers
        ]

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
