"""How the two processes of a pair find each other, and form a process group.

The receiver listens, the writer connects. A listener serves one link: its port and a secret token
are in the answer to the writer, on the pair's own gRPC stream. A process that connects without the
token is rejected.

While they form the group, both communicate over that connection, through a
``torch.distributed.Store`` implemented here. torch's ``TCPStore`` would do the same, but its client
has no deadline: it hangs while the process that hosts it is stopped, and nothing in this process
can end that. The connection stays open while the pair lives. Its end shows that the other process
is gone, which NCCL over NVLink would not notice.
"""

from __future__ import annotations

import contextlib
import errno
import hmac
import os
import secrets
import socket
import struct
import threading
import time
from datetime import timedelta
from typing import Protocol

from torch.distributed.distributed_c10d import Store

from baton.errors import BatonError, DeadlineExceeded, HandoffError, WorkerFailed

TOKEN_BYTES = 32
_HELLO_S = 2.0
_WELCOME = b"\x01"


class Readiness(Protocol):
    """Function that waits for a socket on behalf of a link. It respects the link's deadlines, and
    ends when the link breaks."""

    def __call__(
        self, waited: socket.socket, *, to_write: bool = False, until: float | None = None
    ) -> bool:
        """Wait until the socket is readable or writable.

        Returns False once ``until`` (``time.monotonic``) has passed. Raises the error that ended
        the link.
        """


class Opener(Protocol):
    """Opens one end's connection to the other process: the receiver accepts, and the writer
    connects."""

    def open(self, ready: Readiness) -> socket.socket:
        """Open the connection to the other process. All waiting is done by ``ready``.

        Raises WorkerFailed or HandoffError.
        """

    def close(self) -> None:
        """Stop connecting; idempotent. An opened connection stays open."""


class Acceptor:
    """The receiver's side: listens, and accepts the writer's connection."""

    def __init__(self, host: str) -> None:
        """Listen on a free port of ``host``. Raises HandoffError if that fails."""
        try:
            self._listener = socket.create_server((host, 0), family=_family(host), backlog=4)
        except OSError as error:
            raise HandoffError(f"cannot listen on {host} for KV blocks: {error}") from error
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self.token = secrets.token_hex(TOKEN_BYTES // 2)

    def open(self, ready: Readiness) -> socket.socket:
        """Open the connection to the other process. See ``Opener``."""
        while True:
            ready(self._listener)
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:  # the other process has disconnected again
                continue
            if self._is_welcome(connection, ready):
                with contextlib.suppress(OSError):  # the link notices a disconnect
                    connection.sendall(_WELCOME)
                return connection
            connection.close()

    def close(self) -> None:
        """Stop connecting; idempotent. See ``Opener``."""
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
    """The writer's side: connects to the receiver's port, and sends the token."""

    def __init__(self, host: str, port: int, token: str) -> None:
        self._address = (host, port)
        self._token = token

    def open(self, ready: Readiness) -> socket.socket:
        """Open the connection to the other process. See ``Opener``."""
        connection = socket.socket(_family(self._address[0]), socket.SOCK_STREAM)
        try:
            connection.setblocking(False)
            failure = connection.connect_ex(self._address)
            if failure == errno.EINPROGRESS:
                ready(connection, to_write=True)
                failure = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if failure:
                raise WorkerFailed(f"cannot connect for KV blocks: {os.strerror(failure)}")
            # A new connection has room for these few bytes.
            connection.sendall(self._token.encode())
            # The kernel accepts connections before the receiver does.
            ready(connection)
            if connection.recv(len(_WELCOME)) != _WELCOME:
                raise WorkerFailed("the receiver of KV blocks rejected this writer")
        except BaseException:
            connection.close()
            raise
        return connection

    def close(self) -> None:
        """Stop connecting; idempotent. See ``Opener``."""


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


FORM_S = 5.0
"""Maximum seconds to wait for one value from the other process. That process is forming the group
at the same time."""
_HEADER = struct.Struct("!HI")
_MAX_VALUE_BYTES = 1 << 20
_READ_BYTES = 1 << 16


class PairStore(Store):
    """A torch Store of two processes. Each process reads its own values and those of the other
    process. Thread-safe."""

    def __init__(self, connection: socket.socket) -> None:
        """``connection`` leads to the store of the other process; the caller closes it."""
        super().__init__()
        connection.settimeout(FORM_S)
        self._connection = connection
        self._values: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._sending = threading.Lock()
        self._error: BatonError | None = None
        self._arrived = bytearray()

    def set(self, key: str, value: bytes | str) -> None:
        """Set a value, and send it to the other process. Raises OSError when that process is
        gone."""
        data = value.encode() if isinstance(value, str) else bytes(value)
        self._put(key, data)
        name = key.encode()
        with self._sending:
            self._connection.sendall(_HEADER.pack(len(name), len(data)) + name + data)

    def get(self, key: str) -> bytes:
        """Wait until there is a value for ``key``, and return it. Raises the same errors as
        ``wait``."""
        self.wait([key])
        return self._values[key]

    def check(self, keys: list[str]) -> bool:
        """Whether there is a value for each of ``keys``."""
        with self._changed:
            return all(key in self._values for key in keys)

    def wait(self, keys: list[str], timeout: timedelta | None = None) -> None:
        """Wait until there is a value for each of ``keys``.

        Raises DeadlineExceeded after FORM_S seconds, whatever ``timeout`` torch passes, and the
        error given to ``fail``.
        """
        seconds = FORM_S if timeout is None else min(FORM_S, timeout.total_seconds())
        with self._changed:
            self._changed.wait_for(lambda: self._error is not None or self.check(keys), seconds)
            if self._error is not None:
                raise type(self._error)(self._error.message)
            if not self.check(keys):
                raise DeadlineExceeded(f"the other process did not form the pair in {seconds} s")

    def fail(self, error: BatonError) -> None:
        """End all waits for values with this error."""
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def receive(self) -> bool:
        """Read values that the other process has sent; call it when bytes of them have arrived.

        Returns False if the other process has closed the connection. Raises OSError, and
        HandoffError for data that is not in the format of this store.
        """
        data = self._connection.recv(_READ_BYTES)
        self._arrived += data
        while self._take_value():
            pass
        return bool(data)

    def _take_value(self) -> bool:
        if len(self._arrived) < _HEADER.size:
            return False
        name, length = _HEADER.unpack_from(self._arrived)
        if length > _MAX_VALUE_BYTES:
            raise HandoffError(
                f"got a value of {length} bytes, which is too long, while a pair was formed"
            )
        end = _HEADER.size + name + length
        if len(self._arrived) < end:
            return False
        key = bytes(self._arrived[_HEADER.size : _HEADER.size + name])
        value = bytes(self._arrived[_HEADER.size + name : end])
        del self._arrived[:end]
        self._put(key.decode(errors="replace"), value)
        return True

    def _put(self, key: str, value: bytes) -> None:
        with self._changed:
            self._values[key] = value
            self._changed.notify_all()
