"""The HTTP listeners of a router process: one for clients, and an optional one for operators.

States: made → serving → ending (no new connection) → ended.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from dataclasses import dataclass

from starlette.types import ASGIApp

from baton.config.cluster import Config
from baton.config.fields import split_host_port
from baton.host.background import end_tasks, spawn
from baton.security.tls import LiveContext, server_context
from baton.telemetry.logs import ErrorRow
from router.http.protocol import Bounds
from router.http.server import HttpServer

log = logging.getLogger(__name__)

RENEWAL_POLL_S = 1.0
STOP_GRACE_S = 2
"""Seconds that open connections have to end once the router stops."""


@dataclass(frozen=True, slots=True)
class Apps:
    """The ASGI app of each HTTP listener."""

    http: ASGIApp
    admin: ASGIApp | None
    """The ASGI app of the operators' listener ``admin_http``; None if there is no such listener."""
    paths: tuple[tuple[str, str], ...]
    """Method and path of each endpoint of the two apps."""


class HttpServers:
    """The HTTP servers of a router process. Owned by the router's event loop."""

    def __init__(self, apps: Apps, config: Config) -> None:
        """Create the servers, with TLS if ``config`` has a certificate. Raises ConfigError."""
        self._config = config
        self._certificate: LiveContext | None = None
        if (files := config.tls.fronts) is not None:
            context = server_context(files)
            # gRPC has a port of its own.
            context.set_alpn_protocols(["http/1.1"])
            self._certificate = LiveContext(context, files)
        self._renewing: asyncio.Task[None] | None = None
        self._clients = self._server(apps.http)
        self._operators = None if apps.admin is None else self._server(apps.admin)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> list[asyncio.Task[None]]:
        """Start to listen. Return a task for each server, which ends when its server has ended.
        Raises OSError.
        """
        shares_port = self._config.routers > 1
        pairs = [(self._clients, self._config.http)]
        if self._operators is not None:
            pairs.append((self._operators, self._config.admin_http))
        listening = [_listen(address, shares_port=shares_port) for _, address in pairs]
        self._tasks = [
            asyncio.create_task(server.serve(sockets=[there]))
            for (server, _), there in zip(pairs, listening, strict=True)
        ]
        if self._certificate is not None:
            self._renewing = spawn(_take_up_renewals(self._certificate), "certificates")
        return self._tasks

    def leave(self) -> asyncio.Task[None]:
        """Accept no more connections from clients. Return a task that ends once all HTTP requests
        of clients have ended."""
        self._clients.should_exit = True
        return self._tasks[0]

    async def close(self) -> None:
        """Stop both HTTP servers. The operators' server stops last, so that an operator sees the
        end of a drain."""
        await self.leave()
        if self._operators is not None:
            self._operators.should_exit = True
        await asyncio.gather(*self._tasks)
        if self._renewing is not None:
            await end_tasks([self._renewing])

    def _server(self, app: ASGIApp) -> HttpServer:
        config, certificate = self._config, self._certificate
        limits = config.advanced
        bounds = Bounds(
            max_connections=limits.max_connections,
            max_per_client=limits.max_connections_per_client,
            head_s=limits.head_deadline_s,
            keep_alive_s=limits.keep_alive_s,
            slow_client_s=limits.slow_client_s,
        )
        return HttpServer(
            app,
            bounds,
            context=None if certificate is None else certificate.get(),
            grace_s=int(config.drain_deadline_s) + STOP_GRACE_S,
        )


async def _take_up_renewals(certificate: LiveContext) -> None:
    """Reload the certificate regularly, so that new connections use the current file."""
    errors = ErrorRow(log, "the look at the certificate failed")
    while True:
        await asyncio.sleep(RENEWAL_POLL_S)
        with errors.caught():
            certificate.get()


def _listen(address: str, *, shares_port: bool) -> socket.socket:
    host, port = split_host_port(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listening = socket.socket(family, socket.SOCK_STREAM)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if shares_port:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    listening.bind((host, port))
    return listening
