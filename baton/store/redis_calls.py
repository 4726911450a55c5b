"""Times the calls to Redis of one kind, and counts those that failed."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

import redis
from prometheus_client import Counter, Histogram


class RedisCalls:
    """Owned by the event loop that makes the calls."""

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
        """Around one call. What it raises is raised; one that is cancelled counts for nothing."""
        began = self._clock()
        try:
            yield
        except (redis.RedisError, OSError):
            self._failures.inc()
            raise
        self._seconds.observe(self._clock() - began)
