"""A process's /metrics page on its own port, with TLS where the cluster has certificates.

With TLS, only routers, the supervisor and holders of a monitor's certificate may read it.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import ssl
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app

from baton.host.bounded_threads import BoundedThreads
from baton.security.tls import LiveContext, PeerRole, TlsFiles, roles_in, server_context

log = logging.getLogger(__name__)

_SILENCE_S = 10.0
"""Time without a request or a read after which a connection is closed, in seconds."""
_READERS: frozenset[PeerRole] = frozenset({"router", "supervisor", "monitor"})
_ROLES = "baton.roles"


class MetricsServer:
    """Serves a process's /metrics page from its own threads, until ``stop``."""

    def __init__(
        self,
        host: str,
        registry: CollectorRegistry,
        tls: TlsFiles | None = None,
        ports: Sequence[int] = (0,),
    ) -> None:
        """Listen on the first of ``ports`` that is free on ``host``; 0 is any free port.

        Raises OSError if none is free, and ConfigError for unusable TLS files.
        """
        context = None if tls is None else LiveContext(server_context(tls), tls)
        page = make_wsgi_app(registry)
        shown = page if tls is None else _for_readers(page)
        self._server = _listening(host, ports, context, shown)
        self.port = int(self._server.server_port)
        self._thread = threading.Thread(
            target=self._server.serve_forever, name="metrics", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Stop the server. Call it once; it blocks for about half a second at most."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(_SILENCE_S)


def _listening(host: str, ports: Sequence[int], context: LiveContext | None, page: Any) -> _Server:
    *others, last = ports
    for port in others:
        with contextlib.suppress(OSError):
            return _Server(host, port, context, page)
    return _Server(host, last, context, page)


class _Server(BoundedThreads, WSGIServer):
    def __init__(self, host: str, port: int, context: LiveContext | None, page: Any) -> None:
        self.address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._context = context
        super().__init__((host, port), _Handler)
        self.set_app(page)

    def get_request(self) -> tuple[socket.socket, Any]:
        """Accept a connection, and leave the handshake to the connection's own thread.

        A handshake that never ends must not keep other connections waiting.
        """
        connection, address = super().get_request()
        if self._context is None:
            return connection, address
        shaken = self._context.get().wrap_socket(
            connection, server_side=True, do_handshake_on_connect=False
        )
        return shaken, address

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log an error of a connection. ``socketserver`` would print a stack trace."""
        log.debug("sending a page of metrics failed", exc_info=True)


class _Handler(WSGIRequestHandler):
    timeout = _SILENCE_S

    def get_environ(self) -> dict[str, Any]:
        environ: dict[str, Any] = super().get_environ()
        if isinstance(self.connection, ssl.SSLSocket):
            shown: Any = self.connection.getpeercert() or {}
            names = [name for _, name in shown.get("subjectAltName", ())]
            environ[_ROLES] = roles_in(names)
        return environ

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing for a request. ``http.server`` would print each one."""


def _for_readers(page: Any) -> Callable[[dict[str, Any], Any], Iterable[bytes]]:
    def guarded(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if environ.get(_ROLES, frozenset()) & _READERS:
            found: Iterable[bytes] = page(environ, start_response)
            return found
        start_response("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
        return [f"only for certificates of {', '.join(sorted(_READERS))}\n".encode()]

    return guarded
