"""Connections to Redis, and the timing of calls over them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit

import redis
import redis.asyncio
from prometheus_client import Counter, Histogram
from redis.asyncio.connection import AbstractConnection
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.credentials import CredentialProvider

_PASSWORD_FILE = "password_file"  # noqa: S105 - the name of a parameter
_PASSWORD_BYTES = 4096


def redis_client(url: str, *, timeout_s: float = 1.0) -> redis.asyncio.Redis:
    """Return an asyncio client of ``url``. It connects on first use; every command has a deadline.

    Answers are bytes. A command is not retried here: callers own a loop that tries again. If the
    URL's query has a ``password_file``, each new connection reads the password there. Raises
    ValueError for an invalid URL.
    """
    plain, credentials = parse_password_file(url)
    client = redis.asyncio.Redis.from_url(
        plain,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        health_check_interval=15,
        retry=Retry(NoBackoff(), 0),
    )
    if credentials is not None:
        client.connection_pool.connection_kwargs["credential_provider"] = credentials
    pool = client.connection_pool
    pool.connection_class = _CONNECTIONS[pool.connection_class]
    return client


def parse_password_file(url: str) -> tuple[str, CredentialProvider | None]:
    """Return the URL without user and ``password_file``, and the credentials that these say; the
    URL itself and None if it has no such file. Raises ValueError."""
    parts = urlsplit(url)
    query = dict(parse_qsl(parts.query))
    path = Path(query.pop(_PASSWORD_FILE, ""))
    if path == Path():
        return url, None
    if parts.password:
        raise ValueError("the URL has a password and a password_file: leave one of them out")
    if not path.is_absolute():
        raise ValueError(f"password_file {path} must be an absolute path")
    where = parts.netloc.rpartition("@")[2]
    plain = parts._replace(netloc=where, query=urlencode(query)).geturl()
    return plain, _PasswordFile(unquote(parts.username or ""), path)


class _PasswordFile(CredentialProvider):
    """Reads the password of a user for each connection, so that it may change at any time."""

    def __init__(self, user: str, path: Path) -> None:
        self._user = user
        self._path = path

    def get_credentials(self) -> tuple[str] | tuple[str, str]:
        """Return the user, if there is one, and the password. Raises ``redis.ConnectionError``."""
        try:
            with self._path.open("rb") as file:
                password = file.read(_PASSWORD_BYTES).decode().strip()
        except (OSError, UnicodeDecodeError) as error:
            raise redis.ConnectionError(f"password_file cannot be read: {error}") from error
        if not password:
            raise redis.ConnectionError(f"password_file {self._path} is empty")
        return (self._user, password) if self._user else (password,)

    async def get_credentials_async(self) -> tuple[str] | tuple[str, str]:
        """Return the same as ``get_credentials``. The file is local and small."""
        return self.get_credentials()


class _Cancellable(AbstractConnection):
    """Part of a connection that loses no cancellation.

    The library sends inside ``asyncio.wait_for``, which before Python 3.12 drops a cancellation
    that arrives just when the command is sent. The cancelled task would then go on for ever."""

    async def send_packed_command(
        self, command: bytes | str | Iterable[bytes], check_health: bool = True
    ) -> None:
        """Send a command. Raises as the library does."""
        task = asyncio.current_task()
        cancellations = 0 if task is None else task.cancelling()
        try:
            await super().send_packed_command(command, check_health)
        finally:
            if task is not None and task.cancelling() > cancellations:
                # The connection's next reader would get the answer to this command.
                await self.disconnect(nowait=True)
                raise asyncio.CancelledError


class _PlainConnection(_Cancellable, redis.asyncio.Connection):
    """A connection without TLS."""


class _SocketConnection(_Cancellable, redis.asyncio.UnixDomainSocketConnection):
    """A connection to a Unix socket."""


class _RenewedConnection(_Cancellable, redis.asyncio.SSLConnection):
    """A connection that reads its TLS files at each connect. The library reads them only once."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return super()._connection_arguments()


_CONNECTIONS = {
    redis.asyncio.Connection: _PlainConnection,
    redis.asyncio.UnixDomainSocketConnection: _SocketConnection,
    redis.asyncio.SSLConnection: _RenewedConnection,
}


class RedisCalls:
    """Measures the time of one kind of calls to Redis, and counts calls that failed.

    Owned by the event loop that makes the calls.
    """

    def __init__(
        self,
        seconds: Histogram,
        failures: Counter,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._seconds = seconds
        self._failures = failures
        self._clock = clock

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Time a call to Redis, made in the context's body. Errors are counted and raised again; a
        cancelled call is not counted."""
        began = self._clock()
        try:
            yield
        except (redis.RedisError, OSError):
            self._failures.inc()
            raise
        self._seconds.observe(self._clock() - began)
