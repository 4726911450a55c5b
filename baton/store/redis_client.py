"""The one place where connections to Redis are made."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def redis_client(url: str, *, timeout_s: float = 1.0) -> redis.asyncio.Redis:
    """An asyncio client of ``url``. It connects on first use; every command has a deadline.

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
    """Shows what its files hold when it connects; the library's keeps what they held at first."""

    def _connection_arguments(self) -> Mapping[str, Any]:
        self.ssl_context.context = None
        return super()._connection_arguments()
