"""Connections to Redis, and the timing of calls over them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import redis
import redis.asyncio
from prometheus_client import Counter, Histogram
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def redis_client(url: str, *, timeout_s: float = 1.0) -> redis.asyncio.Redis:
    """Return an asyncio client of ``url``. It connects on first use; every command has a deadline.

    Answers are bytes. A command is not retried here: callers own a loop that tries again.
    """
    client = redis.asyncio.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        health_check_interval=15,
        retry=Retry(NoBackoff(), 0),
    )
    pool = client.connection_pool
    if issubclass(pool.connection_class, redis.asyncio.SSLConnection):
        pool.connection_class = _RenewedConnection
    return client


class _RenewedConnection(redis.asyncio.SSLConnection):
    """A connection that reads its TLS files at each connect. The library reads them only once."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return super()._connection_arguments()


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
