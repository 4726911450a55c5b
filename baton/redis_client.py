"""The one place where connections to Redis are made."""

from __future__ import annotations

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff


def redis_client(url: str, *, timeout_s: float = 1.0) -> redis.asyncio.Redis:
    """An asyncio client of ``url``. It connects on first use; every command has a deadline.

    Answers are bytes. A command is not retried here: callers own a loop that tries again.
    """
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        health_check_interval=15,
        retry=Retry(NoBackoff(), 0),
    )
