"""Plans the batches in the table, both for the process that runs a batch and for those that show
it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from baton.config.daily_hours import DailyHours
from router.batches.schedule.plan import BatchSchedule, BatchWork, plan_batches
from router.batches.schedule.throughput import Throughput
from router.batches.storage.database import Database
from router.batches.storage.store import BatchStore


class BatchPlanner:
    """Plans when and how fast batches run. It uses only the table of batches, so that all processes
    make the same plan. Owned by the event loop."""

    def __init__(
        self,
        store: BatchStore,
        model: str,
        hours: DailyHours | None,
        weights: Mapping[str, float],
        unix_clock: Callable[[], float] = time.time,
    ) -> None:
        """Create a planner. ``model`` is the served model's id; ``weights`` gives the weight of
        each tenant."""
        self._store = store
        self._model = model
        self._hours = hours
        self._weights = weights
        self._throughput = Throughput()
        self._unix_clock = unix_clock

    async def plan(self) -> dict[str, BatchSchedule]:
        """Return the schedules of the batches in progress, by id."""
        if not self._store.used:
            return {}
        works = await self._store.ask(Database.works, self._model)
        progress = await self._store.ask(Database.progress, self._model)
        return self._plan(works, progress.tokens_per_s)

    async def look(self, now: float) -> dict[str, BatchSchedule]:
        """Update the learned speed of batches from their progress. Then return the schedules of the
        batches in progress, by id. ``now`` is monotonic, in seconds."""
        works = await self._store.ask(Database.works, self._model)
        progress = await self._store.ask(Database.progress, self._model)
        speed = progress.tokens_per_s
        schedules = self._plan(works, speed)
        asked = math.fsum(
            schedules[work.id].lines_per_s * (work.tokens_per_line or 1.0) for work in works
        )
        learned = self._throughput.observe(progress, asked, now)
        if learned is None:
            return schedules
        await self._store.ask(Database.learn_speed, self._model, learned)
        return self._plan(works, learned)

    def _plan(self, works: list[BatchWork], tokens_per_s: float | None) -> dict[str, BatchSchedule]:
        return plan_batches(works, tokens_per_s, self._hours, self._weights, self._unix_clock())
