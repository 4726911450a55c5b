"""uvicorn's HTTP protocol with bounds on what a client may send, and on what it may leave unread.

    flowing ─the write buffer is full→ held up ─it has been emptied→ flowing
    held up ─hardly a byte in ``slow_client_s``→ cut off

    waiting for a head ─it is whole→ answered ─another one begins→ waiting for a head
    waiting for a head ─``head_deadline_s`` after it could begin→ cut off

    made ─its client has ``max_connections_per_client`` already→ refused (503), closed

A connection that is held up costs what its buffer holds, ``HIGH_WATER_LIMIT`` and one message, and
the system's own buffer. Owned by the router's event loop.
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
"""Of an IPv6 address: whoever has one has the whole network."""
_NO_LINGER = struct.pack("ii", 1, 0)
SLOW_BYTES = 4096
"""Who reads fewer in ``slow_client_s`` is cut off: a token's event has some 200."""
MAX_HEAD_BYTES = 64 << 10
"""Of a request's head; far more than any client sends."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses a head that does not end.

    The parser gathers a header until it is complete, however long it is, in time that grows with
    the square of its length: one client could fill the router's memory and stop everybody else.
    Bodies are bounded by their readers.
    """

    slow_client_s: ClassVar[float] = 30.0
    head_deadline_s: ClassVar[float] = 10.0
    max_connections_per_client: ClassVar[int] = 0
    """See the configuration."""
    open_by_client: ClassVar[Counter[str]] = Counter()
    """How many there are of each client."""
    _counted_as: str | None = None
    _refused = False
    _head: SilenceTimer | None = None
    """The end of the time that a head has."""
    _look: SilenceTimer | None = None
    """The next look at a client that is held up."""
    _unfinished = 0
    """Bytes since the parser has last completed a head, a piece of a body or a message."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if self.max_connections_per_client and not self._may_come(transport):
            self._refused = True
            transport.write(_TOO_MANY)
            transport.close()
            return
        self._expect_head()

    def _may_come(self, transport: asyncio.Transport) -> bool:
        client = client_of(transport.get_extra_info("peername"))
        if self.open_by_client[client] >= self.max_connections_per_client:
            return False
        self.open_by_client[client] += 1
        self._counted_as = client
        return True

    def _count_no_more(self) -> None:
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

    def _expect_no_head(self) -> None:
        if self._head is not None:
            self._head.cancel()
            self._head = None

    def _head_is_late(self) -> None:
        if self.cycle is not None and not self.cycle.response_complete:
            # The next request has begun before this one's answer ended, and may have to wait.
            self._expect_head()
            return
        self._head = None
        if not self.transport.is_closing():
            self.transport.write(_LATE)
            self.transport.close()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.timeout_keep_alive_task is not None:
            # uvicorn's own timer would close a connection with a request that is not read yet.
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
        self._expect_no_head()
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
        self._look_later()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._look_no_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._look_no_more()
        self._expect_no_head()
        self._count_no_more()
        super().connection_lost(exc)

    def _look_later(self) -> None:
        unread = self._unread()
        self._look = SilenceTimer(self.slow_client_s, lambda: self._look_at(unread))

    def _look_no_more(self) -> None:
        if self._look is not None:
            self._look.cancel()
            self._look = None

    def _unread(self) -> int:
        """Bytes that wait for the client. The system's buffer may have megabytes, and makes room in

        large steps: our own alone would not tell that a client reads.
        """
        connection = self.transport.get_extra_info("socket")
        queued = fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, bytes(4))
        return self.transport.get_write_buffer_size() + int.from_bytes(queued, sys.byteorder)

    def _look_at(self, before: int) -> None:
        if before - self._unread() >= SLOW_BYTES:
            self._look_later()
            return
        log.info("a client that does not read is cut off")
        # Neither the transport nor the system keeps what it might still read.
        connection = self.transport.get_extra_info("socket")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        self.transport.abort()


def client_of(peer: tuple[str, int] | tuple[str, int, int, int] | None) -> str:
    """By what a client's connections are counted, of a socket's peer name."""
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
    """The protocol of a server whose clients may be held up for so long, in seconds, and have so

    many connections at a time; 0: any number.
    """
    bounds = {
        "slow_client_s": slow_client_s,
        "head_deadline_s": head_deadline_s,
        "max_connections_per_client": max_connections_per_client,
        "open_by_client": Counter(),
    }
    return type("HttpProtocol", (BoundedHttpProtocol,), bounds)
