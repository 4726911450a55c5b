"""Threads of a small HTTP server, whose number has a bound whatever its clients do."""

from __future__ import annotations

import contextlib
import socket
import threading
from socketserver import ThreadingMixIn
from typing import Any


class BoundedThreads(ThreadingMixIn):
    """Mixin of a ``socketserver.TCPServer``: a thread for each connection, CONNECTIONS at most.

    If there are as many, a new connection ends the oldest one. So clients that say nothing, or
    send a byte now and then, keep no other client out.
    """

    CONNECTIONS = 32
    daemon_threads = True

    def __init__(self, *arguments: Any) -> None:
        """Take the arguments of the server."""
        self._lock = threading.Lock()
        self._open: dict[socket.socket, None] = {}
        """Connections by age, the oldest first."""
        super().__init__(*arguments)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer a connection in a thread of its own."""
        with self._lock:
            if len(self._open) >= self.CONNECTIONS:
                oldest = next(iter(self._open))
                del self._open[oldest]
                # Its thread finds the end of the connection. A TLS socket's own method would
                # change what that thread uses.
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(oldest, socket.SHUT_RDWR)
            self._open[request] = None
        super().process_request(request, client_address)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer a connection, and forget it."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            with self._lock:
                self._open.pop(request, None)
