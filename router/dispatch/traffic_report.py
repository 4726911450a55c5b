"""Shares the traffic counts of this router process. Owned by the router's event loop.

new ─start()→ reporting ─close()→ removed
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import redis

from baton.autoscaling.traffic import RouterTraffic, TrafficCounts
from baton.autoscaling.traffic_store import TELL_S, TrafficStore
from baton.host.background import end_tasks, spawn
from baton.telemetry.logs import ErrorRow

log = logging.getLogger(__name__)


class TrafficReport:
    """Writes this router's traffic counts to Redis. Since counts only grow, no traffic is lost by
    an outage of Redis."""

    def __init__(self, board: TrafficStore, router_id: str, counts: TrafficCounts) -> None:
        """Create a report. ``router_id``: a unique id of this process. ``counts``: the counts,
        which change while the process runs."""
        self._board = board
        self._router_id = router_id
        self._counts = counts
        self._beat = 0
        self._is_failing = False
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the task that reports traffic counts."""
        self._tasks = [spawn(self._report(), "traffic")]

    async def close(self) -> None:
        """Stop reporting, and remove this router's counts from Redis. Does nothing if the report
        was never started.
        """
        if self._tasks:
            await end_tasks(self._tasks)
            with contextlib.suppress(redis.RedisError, OSError):
                await self._board.remove([self._router_id])

    async def _report_once(self) -> None:
        try:
            await self._board.write(self._router_id, RouterTraffic(self._beat, self._counts))
            self._is_failing = False
        except (redis.RedisError, OSError) as error:
            if not self._is_failing:
                log.info("the traffic report cannot be written: %s", error)
            self._is_failing = True

    async def _report(self) -> None:
        errors = ErrorRow(log, "the traffic report failed")
        while True:
            self._beat += 1
            with errors.caught():
                await self._report_once()
            await asyncio.sleep(TELL_S)
