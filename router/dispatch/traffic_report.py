"""Tells the autoscaler what has come to this router process. Owned by the router's event loop.

new ─start()→ telling ─close()→ struck off
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

import redis

from baton.autoscaling.traffic import RouterTraffic, TrafficCounts
from baton.autoscaling.traffic_store import TELL_S, TrafficStore
from baton.host.background import end_tasks, spawn

log = logging.getLogger(__name__)


class TrafficReport:
    """While Redis is away nothing is told, and nothing is lost: counts only grow."""

    def __init__(self, board: TrafficStore, router_id: str, counts: TrafficCounts) -> None:
        """``router_id`` is of this process's life; ``counts`` goes on being counted in."""
        self._board = board
        self._router_id = router_id
        self._counts = counts
        self._beat = 0
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to tell."""
        self._tasks = [spawn(self._tell(), "traffic")]

    async def close(self) -> None:
        """This router serves no more; does nothing where it never told."""
        if self._tasks:
            await end_tasks(self._tasks)
            with contextlib.suppress(redis.RedisError, OSError):
                await self._board.remove([self._router_id])

    async def _tell(self) -> None:
        while True:
            self._beat += 1
            try:
                await self._board.write(self._router_id, RouterTraffic(self._beat, self._counts))
            except (redis.RedisError, OSError) as error:
                log.info("the traffic cannot be told: %s", error)
            await asyncio.sleep(TELL_S)
