"""Serves one app on one listening socket, and bounds the number of connections.

    accepting ─too many connections→ the new one is refused, with 503 where there is no TLS
    accepting ─there are no descriptors left→ resting ─``_REST_S`` later→ accepting
    accepting, resting ─shutdown→ ending (open requests go on) → ended

It accepts connections itself. uvicorn's listener does not count those in their TLS handshake, and
bounds neither the time of a handshake nor that of closing a TLS connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import socket
import ssl
from functools import partial

import uvicorn
from starlette.types import ASGIApp

from baton.host.background import end_tasks
from router.access.places import Place, Places
from router.http.protocol import BoundedHttpProtocol, Bounds, plain_answer
from router.http.uvicorn_internals import QuietServer

log = logging.getLogger(__name__)

_BACKLOG = 2048
_REST_S = 1.0
_CLIENT_BITS = 64
"""Number of leading bits of an IPv6 address that identify a client, since one client may use all
addresses of its network."""
_TLS_END_S = 1.0
"""Seconds that closing a TLS connection waits for the client's reply."""
_TOO_MANY = plain_answer(503, "There are too many connections.", "retry-after: 1")


class HttpServer(QuietServer):
    """An HTTP server with bounded connections. Owned by the router's event loop."""

    def __init__(
        self,
        app: ASGIApp,
        bounds: Bounds,
        *,
        context: ssl.SSLContext | None = None,
        grace_s: int | None = None,
    ) -> None:
        """Create a server for ``app``. It uses TLS if ``context`` is given.

        ``grace_s``: seconds for which requests may continue during shutdown."""
        config = uvicorn.Config(
            app,
            ws="none",
            log_config=None,
            access_log=False,
            # The client's address behind a proxy is not used.
            proxy_headers=False,
            lifespan="off",
            timeout_graceful_shutdown=grace_s,
        )
        super().__init__(config)
        self._bounds = bounds
        self._places = Places(bounds.max_connections, bounds.max_per_client, bounds.shortest_s)
        self._context = context
        self._listening: list[socket.socket] = []
        self._resting: asyncio.TimerHandle | None = None
        self._opening: set[asyncio.Task[None]] = set()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen on ``sockets``. uvicorn calls this method."""
        self._listening = list(sockets or ())
        for listening in self._listening:
            listening.setblocking(False)
            listening.listen(_BACKLOG)
        self._accept()
        self.servers = []
        self.started = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Accept no more connections, and let open ones end within the grace period. uvicorn calls
        this method.
        """
        self._rest()
        await end_tasks(self._opening)
        await super().shutdown(sockets)

    def _accept(self) -> None:
        self._resting = None
        loop = asyncio.get_running_loop()
        for listening in self._listening:
            loop.add_reader(listening, self._on_ready, listening)

    def _rest(self) -> None:
        if self._resting is not None:
            self._resting.cancel()
            self._resting = None
        loop = asyncio.get_running_loop()
        for listening in self._listening:
            loop.remove_reader(listening)

    def _on_ready(self, listening: socket.socket) -> None:
        # Accept one per turn of the event loop. A request needs a dozen turns, and a crowd of new
        # clients would lengthen each of them.
        try:
            client, address = listening.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return
        except OSError as error:
            log.error("a connection cannot be accepted: %s", error)
            self._rest()
            self._resting = asyncio.get_running_loop().call_later(_REST_S, self._accept)
            return
        self._take(client, client_of(address))

    def _take(self, client: socket.socket, name: str) -> None:
        client.setblocking(False)
        cut = partial(_cut, client)
        place = self._places.admit(name, cut)
        if place is None:
            if self._context is None:
                with contextlib.suppress(OSError):
                    client.send(_TOO_MANY)
            client.close()
            return
        place.wait(self._bounds.head_s, cut)
        opening = asyncio.create_task(self._open(client, place), name="connection")
        self._opening.add(opening)
        opening.add_done_callback(self._opening.discard)

    async def _open(self, client: socket.socket, place: Place) -> None:
        loop = asyncio.get_running_loop()
        protocol = partial(
            BoundedHttpProtocol,
            self.config,
            self.server_state,
            self.lifespan.state,
            place,
            self._bounds,
        )
        try:
            # Without this, an answer's second packet waits 40 ms for the client's acknowledgement.
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._context is None:
                await loop.connect_accepted_socket(protocol, client)
            else:
                await loop.connect_accepted_socket(
                    protocol,
                    client,
                    ssl=self._context,
                    ssl_handshake_timeout=self._bounds.head_s,
                    ssl_shutdown_timeout=_TLS_END_S,
                )
        except OSError as error:
            # The client does not speak TLS, has left, or took too long.
            log.debug("a connection was not made: %s", error)
            place.release()
            client.close()
        except asyncio.CancelledError:
            place.release()
            client.close()
            raise


def _cut(client: socket.socket) -> None:
    """End a client's connection that no protocol owns yet. A pending read from the connection then
    ends."""
    with contextlib.suppress(OSError):
        client.shutdown(socket.SHUT_RDWR)


def client_of(peer: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return the name of the client under which a connection is counted. ``peer`` is the peer name
    of the connection's socket."""
    address = ipaddress.ip_address(peer[0].partition("%")[0])
    if address.version == 4:
        return str(address)
    if address.ipv4_mapped is not None:
        return str(address.ipv4_mapped)
    return str(ipaddress.ip_network((int(address), _CLIENT_BITS), strict=False))
