"""Asks the prefix index which workers hold a prompt's blocks; does without it while it is away.

    there ─a lookup fails, or takes too long→ away
    away ─a lookup in the background is answered→ there

The request that meets the first sign of it waits for up to ``DEADLINE_S``; later ones do not wait.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import redis

from baton.host.background import end_tasks
from baton.store.prefix_index import PrefixIndex
from baton.telemetry.metrics import RouterMetrics

log = logging.getLogger(__name__)

DEADLINE_S = 0.1
"""A lookup that takes longer is done without."""
RETRY_S = 0.5
"""Between two tries while the index is away."""


class PrefixLookup:
    """Owned by the router's event loop."""

    def __init__(self, index: PrefixIndex, metrics: RouterMetrics) -> None:
        self._index = index
        self._calls = metrics.redis_calls("prefix_lookup")
        self._lookups = metrics.prefix_lookups
        self._running: set[asyncio.Task[dict[str, int]]] = set()
        self._away = False
        self._next_try = 0.0

    async def ask(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks each incarnation holds; nothing while the index is away."""
        if self._away:
            now = asyncio.get_running_loop().time()
            if not self._running and now >= self._next_try:
                self._start(hashes)
            self._lookups.labels("away").inc()
            return {}
        lookup = self._start(hashes)
        # Waited for from outside: a client's hang-up must not be lost in it (see end_tasks).
        await asyncio.wait([lookup], timeout=DEADLINE_S)
        if not lookup.done():
            # It goes on, and tells when the index is back. The client's own deadline ends it.
            self._lost("no answer in time")
            self._lookups.labels("late").inc()
            return {}
        failed = lookup.cancelled() or lookup.exception() is not None
        self._lookups.labels("failed" if failed else "answered").inc()
        return {} if failed else lookup.result()

    async def close(self) -> None:
        """End what is under way."""
        await end_tasks(self._running)

    def _start(self, hashes: Sequence[bytes]) -> asyncio.Task[dict[str, int]]:
        lookup = asyncio.create_task(self._look_up(hashes), name="prefix lookup")
        self._running.add(lookup)
        lookup.add_done_callback(self._ended)
        return lookup

    async def _look_up(self, hashes: Sequence[bytes]) -> dict[str, int]:
        with self._calls.one():
            return await self._index.lookup(hashes)

    def _ended(self, lookup: asyncio.Task[dict[str, int]]) -> None:
        self._running.discard(lookup)
        if lookup.cancelled():
            return
        error = lookup.exception()
        if error is None:
            if self._away:
                log.info("the prefix index answers again")
            self._away = False
            return
        self._lost(repr(error))
        if not isinstance(error, redis.RedisError):
            log.error("a prefix lookup failed", exc_info=error)

    def _lost(self, reason: str) -> None:
        if not self._away:
            log.warning("routing goes on without the prefix index: %s", reason)
        self._away = True
        self._next_try = asyncio.get_running_loop().time() + RETRY_S
