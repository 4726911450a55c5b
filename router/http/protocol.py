"""uvicorn's HTTP protocol with bounds on heads, slow clients, and connections of a client.

    flowing ─the write buffer is full→ paused ─the client has read it→ flowing
    paused ─fewer than ``SLOW_BYTES`` read in ``slow_client_s``→ aborted

    waiting for a head ─it is complete→ answering ─another one begins→ waiting for a head
    waiting for a head ─``head_deadline_s`` later→ closed (408)

    made ─its client has ``max_connections_per_client`` already→ closed (503)

A paused connection uses its buffer, which is ``HIGH_WATER_LIMIT`` and one message, and the kernel's
buffer. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import ipaddress
import logging
import socket
import struct
import sys
import termios
from collections import Counter
from typing import ClassVar

from baton.liveness.listening import SilenceTimer
from router.http.uvicorn_internals import HttpToolsProtocol

log = logging.getLogger(__name__)

_LATE = (
    b"HTTP/1.1 408 Request Timeout\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 44\r\nconnection: close\r\n\r\nThe request's head did not arrive in time.\r\n"
)
_TOO_MANY = (
    b"HTTP/1.1 503 Service Unavailable\r\ncontent-type: text/plain; charset=utf-8\r\n"
    b"content-length: 48\r\nretry-after: 1\r\nconnection: close\r\n\r\n"
    b"There are too many connections from your host.\r\n"
)
_CLIENT_BITS = 64
"""Bits of an IPv6 address that name a client: it has all addresses of its network."""
_NO_LINGER = struct.pack("ii", 1, 0)
SLOW_BYTES = 4096
"""A client that reads fewer bytes in ``slow_client_s`` is cut off. An event has about 200."""
MAX_HEAD_BYTES = 64 << 10
"""Maximum size of a request's head."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """A connection. It refuses a head that is too large or too slow.

    The parser collects a header of any length, in time quadratic in its length: without a bound one
    client could fill the router's memory and block its event loop. Readers bound bodies.
    """

    slow_client_s: ClassVar[float] = 30.0
    head_deadline_s: ClassVar[float] = 10.0
    max_connections_per_client: ClassVar[int] = 0
    """Configuration fields of these names."""
    open_by_client: ClassVar[Counter[str]] = Counter()
    """Open connections, by client."""
    _counted_as: str | None = None
    _refused = False
    _head: SilenceTimer | None = None
    """The deadline of a head."""
    _progress_timer: SilenceTimer | None = None
    """The next check of a paused client."""
    _unfinished = 0
    """Bytes since the parser last completed a head, a part of a body or a message."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.max_connections_per_client and not self._admit(transport):
            self._refused = True
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._expect_head()

    def _admit(self, transport: asyncio.Transport) -> bool:
        client = client_of(transport.get_extra_info("peername"))
        if self.open_by_client[client] >= self.max_connections_per_client:
            return False
        self.open_by_client[client] += 1
        self._counted_as = client
        return True

    def _release(self) -> None:
        if self._counted_as is None:
            return
        self.open_by_client[self._counted_as] -= 1
        if not self.open_by_client[self._counted_as]:
            del self.open_by_client[self._counted_as]
        self._counted_as = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if self._head is None:
            self._expect_head()

    def _expect_head(self) -> None:
        self._head = SilenceTimer(self.head_deadline_s, self._head_is_late)

    def _head_complete(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The next request began before this response ended, and may have to wait.
            self._expect_head()
            return
        self._head = None
        if not self.transport.is_closing():
            self.transport.write(_LATE)
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            # uvicorn's own timer would close a connection whose next request is not read yet.
            self.timeout_keep_alive_task.cancel()
            idle = SilenceTimer(self.timeout_keep_alive, self.timeout_keep_alive_handler)
            self.timeout_keep_alive_task = idle  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._unfinished += len(data)
        super().data_received(data)
        if self._unfinished > MAX_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_headers_complete(self) -> None:
        self._unfinished = 0
        self._head_complete()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._unfinished = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._unfinished = 0
        super().on_message_complete()

    # A client that does not read

    def pause_writing(self) -> None:
        super().pause_writing()
        self._check_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end_checks()

    def connection_lost(self, exc: Exception | None) -> None:
        self._end_checks()
        self._head_complete()
        self._release()
        super().connection_lost(exc)

    def _check_later(self) -> None:
        unread = self._unread()
        self._progress_timer = SilenceTimer(
            self.slow_client_s, lambda: self._check_progress(unread)
        )

    def _end_checks(self) -> None:
        if self._progress_timer is not None:
            self._progress_timer.cancel()
            self._progress_timer = None

    def _unread(self) -> int:
        """Bytes that wait for the client, in the kernel's buffer too.

        That buffer may hold megabytes and frees them in large steps, so this process' buffer alone
        does not show that a client reads.
        """
        connection = self.transport.get_extra_info("socket")
        queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _check_progress(self, before: int) -> None:
        if before - self._unread() >= SLOW_BYTES:
            self._check_later()
            return
        log.info("a client that does not read is cut off")
        # Drop both buffers: neither the transport nor the kernel keeps unread bytes.
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()


def client_of(peer: tuple[str, int] | tuple[str, int, int, int] | None) -> str:
    """The client of a socket's peer name, by which connections are counted."""
    if not peer:
        return ""
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _CLIENT_BITS), strict=False))


def http_protocol(
    slow_client_s: float,
    head_deadline_s: float = BoundedHttpProtocol.head_deadline_s,
    max_connections_per_client: int = 0,
) -> type[BoundedHttpProtocol]:
    """The protocol class of one server.

    A client may be paused for ``slow_client_s``, and have ``max_connections_per_client`` open
    connections (0: any number). A head must arrive within ``head_deadline_s``.
    """
    bounds = {
        "slow_client_s": slow_client_s,
        "head_deadline_s": head_deadline_s,
        "max_connections_per_client": max_connections_per_client,
        "open_by_client": Counter(),
    }
    return type("HttpProtocol", (BoundedHttpProtocol,), bounds)
