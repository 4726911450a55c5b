"""uvicorn's HTTP protocol with bounds on what a client may send, and on what it may leave unread.

    flowing ─the write buffer is full→ held up ─it has been emptied→ flowing
    held up ─hardly a byte in ``slow_client_s``→ cut off

A connection that is held up costs what its buffer holds, ``HIGH_WATER_LIMIT`` and one message, and
the system's own buffer. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import sys
import termios
from typing import ClassVar

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

log = logging.getLogger(__name__)

_NO_LINGER = struct.pack("ii", 1, 0)
SLOW_BYTES = 4096
"""Who reads fewer in ``slow_client_s`` is cut off: a token's event has some 200."""
MOST_HEAD_BYTES = 64 << 10
"""Of a request's head; far more than any client sends."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Refuses a head that does not end.

    The parser gathers a header until it is complete, however long it is, in time that grows with
    the square of its length: one client could fill the router's memory and stop everybody else.
    Bodies are bounded by their readers.
    """

    slow_client_s: ClassVar[float] = 30.0
    """See the configuration."""
    _look: asyncio.TimerHandle | None = None
    """The next look at a client that is held up."""
    _unfinished = 0
    """Bytes since the parser has last completed a head, a piece of a body or a message."""

    def data_received(self, data: bytes) -> None:
        self._unfinished += len(data)
        super().data_received(data)
        if self._unfinished > MOST_HEAD_BYTES and not self.transport.is_closing():
            self.send_400_response("The request's head is too large.")

    def on_headers_complete(self) -> None:
        self._unfinished = 0
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
        super().connection_lost(exc)

    def _look_later(self) -> None:
        self._look = self.loop.call_later(self.slow_client_s, self._look_at, self._unread())

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


def http_protocol(slow_client_s: float) -> type[BoundedHttpProtocol]:
    """The protocol of a server whose clients may be held up for so long, in seconds."""
    return type("HttpProtocol", (BoundedHttpProtocol,), {"slow_client_s": slow_client_s})
