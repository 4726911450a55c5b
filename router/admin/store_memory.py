"""The memory of the cluster's Redis, as a metric."""

from __future__ import annotations

import asyncio
import logging
from typing import NoReturn

import redis
import redis.asyncio

from baton.telemetry.logs import ErrorRow
from baton.telemetry.metrics import RouterMetrics

POLL_S = 15.0

log = logging.getLogger(__name__)


class StoreMemory:
    """Reads the memory of Redis every ``POLL_S`` seconds. Each router does: every mode of a
    deployment has one."""

    def __init__(self, client: redis.asyncio.Redis, metrics: RouterMetrics) -> None:
        self._client = client
        self._metrics = metrics

    async def run(self) -> NoReturn:
        """Keep the metrics up to date until cancelled."""
        errors = ErrorRow(log, "the look at the memory of Redis failed")
        while True:
            with errors.caught():
                try:
                    await self.look()
                except (redis.RedisError, OSError) as error:
                    log.debug("cannot read the memory of Redis: %s", error)
            await asyncio.sleep(POLL_S)

    async def look(self) -> None:
        """Set the metrics. Raises redis.RedisError or OSError if Redis does not answer."""
        found = await self._client.info("memory")
        total = found.get("maxmemory") or found.get("total_system_memory")
        self._metrics.redis_memory_used_bytes.set(found["used_memory"])
        # Some hosted Redis servers tell neither.
        if total:
            self._metrics.redis_memory_total_bytes.set(total)
