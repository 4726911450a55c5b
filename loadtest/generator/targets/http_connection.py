"""Implements HTTP/1.1 for many concurrent streamed answers at low cost: a protocol, a C parser,
callbacks.

A client library that wakes a task for each piece of each answer would cost more than a fast server.
The measurement would then show the client.
"""

from __future__ import annotations

import asyncio
import socket
import time
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from baton.errors import ConfigError
from baton.security.tls import TlsFiles, client_context

_IDLE_S = 1.0
"""Idle time of a connection in seconds. After it, the pool assumes that the server may have closed
the connection."""


class HttpExchange(Protocol):
    """Receives the answer to one request."""

    def head(self, status: int, headers: dict[bytes, bytes]) -> None:
        """Handle the answer's status and headers. Header names are in lower case."""

    def body(self, data: bytes, now: float) -> None:
        """Handle a piece of the answer's body, which arrived at ``now`` by
        ``time.perf_counter``."""

    def end(self, fault: str) -> None:
        """Handle the end of the answer. ``fault`` is the reason if the answer is incomplete,
        otherwise empty.
        """


@dataclass(frozen=True, slots=True)
class Origin:
    """The scheme, host, port and base path of the server to which requests go."""

    host: str
    port: int
    tls: bool
    path: str
    """Base path of the server, to which each request's path is appended. It is empty, or has no
    slash at its end."""

    @classmethod
    def parse(cls, url: str) -> Origin:
        """Parse a URL such as ``http://host:port``, with or without a path. Raises ConfigError."""
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError(f"{url!r} is not a URL: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.query:
            raise ConfigError(f"{url!r} is not a URL as in http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        return cls(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/"))

    @property
    def authority(self) -> str:
        """Return the value of the Host header."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


class HttpPool:
    """Pool of connections to one origin; idle ones are reused. Owned by one event loop."""

    def __init__(self, origin: Origin, tls: TlsFiles | None = None) -> None:
        """``tls`` has the CA and the client certificate for an https origin. Raises ConfigError."""
        self._origin = origin
        self._tls = client_context(tls or TlsFiles()) if origin.tls else None
        self._idle: list[HttpConnection] = []
        self._all: set[HttpConnection] = set()

    async def take(self) -> HttpConnection:
        """Return an idle connection, or open one. Raises OSError if that fails."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_fresh:
                return connection
            connection.close()
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(
            lambda: HttpConnection(self._idle, self._all),
            self._origin.host,
            self._origin.port,
            ssl=self._tls,
        )
        return connection

    def close(self) -> None:
        """Close all connections of the pool."""
        for connection in list(self._all):
            connection.close()


class HttpConnection(asyncio.Protocol):
    """One HTTP connection: idle, or with one exchange in flight."""

    def __init__(self, idle: list[HttpConnection], all_: set[HttpConnection]) -> None:
        self._idle, self._all = idle, all_
        self._transport: asyncio.Transport | None = None
        self._socket: socket.socket | None = None
        self._exchange: HttpExchange | None = None
        self._parser: httptools.HttpResponseParser
        self._headers: dict[bytes, bytes] = {}
        self._came_at = 0.0

    @property
    def is_fresh(self) -> bool:
        """Whether the connection was used so recently that the server has probably not closed
        it."""
        return self._transport is not None and time.perf_counter() - self._came_at < _IDLE_S

    def send(self, request: bytes, exchange: HttpExchange) -> None:
        """Send a request. ``exchange`` receives its answer."""
        assert self._transport is not None, "connected"
        self._exchange = exchange
        self._headers = {}
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        # If a server writes an answer's head and first event separately, with Nagle's algorithm on,
        # it would wait 40 ms for this end's acknowledgement. The flag only holds for the next
        # packets.
        if self._socket is not None:
            self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_QUICKACK, 1)

    def close(self) -> None:
        """Close the connection. An exchange in flight ends."""
        if self._transport is not None:
            self._transport.abort()

    # asyncio's callbacks

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transport is not a subclass of asyncio's, but has the same methods.
        self._transport = cast(asyncio.Transport, transport)
        if hasattr(socket, "TCP_QUICKACK"):
            self._socket = transport.get_extra_info("socket")
        self._all.add(self)

    def data_received(self, data: bytes) -> None:
        self._came_at = time.perf_counter()
        if self._exchange is None:
            self.close()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(f"not HTTP: {error}")
            self.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._transport = self._socket = None
        self._all.discard(self)
        self._finish("the connection was lost")

    def _finish(self, fault: str) -> None:
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.end(fault)

    # httptools' callbacks

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.lower()] = value

    def on_headers_complete(self) -> None:
        if self._exchange is not None:
            self._exchange.head(self._parser.get_status_code(), self._headers)

    def on_body(self, body: bytes) -> None:
        if self._exchange is not None:
            self._exchange.body(body, self._came_at)

    def on_message_complete(self) -> None:
        self._finish("")
        if self._parser.should_keep_alive():
            self._idle.append(self)
        else:
            self.close()
