"""How the two processes of a pair find each other: the receiver listens, the writer connects.

A listener serves one link: its port and a secret token travel in the answer to the writer, over
the pair's own gRPC stream, and whoever connects without the token is turned away.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import time
from typing import Protocol

from baton.errors import HandoffError, WorkerFailed

TOKEN_BYTES = 32
_HELLO_S = 2.0
_WELCOME = b"\x01"


class Readiness(Protocol):
    """How a link waits for a socket."""

    def __call__(
        self, waited: socket.socket, *, to_write: bool = False, until: float | None = None
    ) -> bool:
        """Until it can be read or written. False once ``until`` (``time.monotonic``) has come.

        Raises what the link was ended with.
        """


class Opener(Protocol):
    """One way to the other process."""

    def open(self, ready: Readiness) -> socket.socket:
        """The connection. Waits by ``ready`` alone. Raises WorkerFailed or HandoffError."""

    def close(self) -> None:
        """Idempotent; the opened connection stays."""


class Acceptor:
    """The receiver's side."""

    def __init__(self, host: str) -> None:
        """Listens on a free port of ``host``. Raises HandoffError where it cannot."""
        try:
            self._listener = socket.create_server((host, 0), family=_family(host), backlog=4)
        except OSError as error:
            raise HandoffError(f"cannot listen on {host} for KV blocks: {error}") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(TOKEN_BYTES // 2)

    def open(self, ready: Readiness) -> socket.socket:
        """See ``Opener``."""
        while True:
            ready(self._listener)
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:  # who knocked has left again
                continue
            if self._is_welcome(connection, ready):
                with contextlib.suppress(OSError):  # who has left again is noticed by its link
                    connection.sendall(_WELCOME)
                return connection
            connection.close()

    def close(self) -> None:
        """See ``Opener``."""
        self._listener.close()

    def _is_welcome(self, connection: socket.socket, ready: Readiness) -> bool:
        connection.setblocking(False)
        hello = b""
        until = time.monotonic() + _HELLO_S
        try:
            while len(hello) < TOKEN_BYTES and ready(connection, until=until):
                data = connection.recv(TOKEN_BYTES - len(hello))
                if not data:
                    return False
                hello += data
        except OSError:
            return False
        except BaseException:
            connection.close()
            raise
        return hmac.compare_digest(hello, self.token.encode())


class Connector:
    """The writer's side."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._address = (host, port)
        self._token = token

    def open(self, ready: Readiness) -> socket.socket:
        """See ``Opener``."""
        connection = socket.socket(_family(self._address[0]), socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            failure = connection.connect_ex(self._address)
            if failure == errno.EINPROGRESS:
                ready(connection, to_write=True)
                failure = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure:
                raise WorkerFailed(f"cannot connect for KV blocks: {os.strerror(failure)}")
            # A fresh connection has room for these few bytes.
            connection.sendall(self._token.encode())
            # The kernel takes connections for a receiver that is not there yet.
            ready(connection)
            if connection.recv(len(_WELCOME)) != _WELCOME:
                raise WorkerFailed("the receiver of KV blocks turned this writer away")
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """See ``Opener``."""


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET
