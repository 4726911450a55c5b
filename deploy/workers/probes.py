"""The HTTP listener for probes of a worker's process: ``/live`` and ``/ready``, without TLS.

A kubelet has no client certificate, so it can ask neither the metrics page nor gRPC. The answers
tell nothing but whether the worker runs and whether routers may send work to it.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, HTTPServer

from baton.host.bounded_threads import BoundedThreads

_SILENCE_S = 5.0
"""Time without a request after which a connection is closed, in seconds."""


class ProbeServer:
    """Serves the probes from its own threads, until ``stop``."""

    def __init__(self, host: str, port: int, is_ready: Callable[[], bool]) -> None:
        """Listen on ``port`` of ``host``; 0 is any free port. Any thread calls ``is_ready``. Raises
        OSError."""

        class Handler(BaseHTTPRequestHandler):
            timeout = _SILENCE_S

            def do_GET(self) -> None:
                """Answer one probe."""
                ready = self.path == "/live" or (self.path == "/ready" and is_ready())
                known = self.path in ("/live", "/ready")
                refused = HTTPStatus.SERVICE_UNAVAILABLE if known else HTTPStatus.NOT_FOUND
                self.send_response(HTTPStatus.OK if ready else refused)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: kubelets ask every few seconds."""

        class Server(BoundedThreads, HTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET

        self._server = Server((host, port), Handler)
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="probes", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the listener. Call it once."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_SILENCE_S)
