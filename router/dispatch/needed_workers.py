"""Exports how many workers of each role the traffic needs, whether or not there is an autoscaler.

The figures are those of the autoscaler: the traffic of all routers, and the capacity of the workers
that this router knows. It never acts on them. Owned by the router's event loop.

new ─start()→ looking ─close()→ closed
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence

import redis

from baton.autoscaling.cluster_figures import ROLES, WorkerFigures, WorkerState
from baton.autoscaling.demand import DemandReader
from baton.autoscaling.needs import WorkerNeeds
from baton.autoscaling.traffic import TrafficTracker
from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config
from baton.host.background import end_tasks, spawn
from baton.store.registry import DRAINING, WorkerRecord
from baton.telemetry.logs import ErrorRow
from baton.telemetry.metrics import RouterMetrics

log = logging.getLogger(__name__)


class NeededWorkers:
    """Computes the workers that the traffic needs, once in every ``autoscaler.interval_s``."""

    def __init__(
        self,
        config: Config,
        store: TrafficStore,
        records: Callable[[], Sequence[WorkerRecord]],
        metrics: RouterMetrics,
    ) -> None:
        """``records`` returns the registry records of all workers."""
        self._interval_s = config.autoscaler.interval_s
        self._store = store
        self._records = records
        self._gauge = metrics.needed_workers
        self._tracker = TrafficTracker()
        self._demand = DemandReader(config.slo_tpot_s)
        self._needs = WorkerNeeds(config.autoscaler)
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Start the task that looks at the traffic."""
        self._tasks = [spawn(self._run(), "needed workers")]

    async def close(self) -> None:
        """End the task; idempotent."""
        await end_tasks(self._tasks)

    async def look(self, now: float) -> None:
        """Update the metric. Nothing changes while the traffic or the workers are unknown. ``now``
        is in seconds of a monotonic clock. Raises ``redis.RedisError``, OSError."""
        traffic = self._tracker.look(await self._store.read(), now)
        # Routers that were killed leave their counts in Redis.
        await self._store.remove(self._tracker.gone(now))
        records = [record for record in self._records() if record.state != DRAINING]
        if traffic is None or not records:
            return
        demand = self._demand.read(traffic, records)
        # A correction for missed SLOs needs the autoscaler's patience: it waits after each change.
        balance = self._needs.look([_figures(one) for one in records], demand, now, rested=False)
        for role in ROLES:
            self._gauge.labels(role).set(balance.need[role])

    async def _run(self) -> None:
        errors = ErrorRow(log, "the look at the traffic failed")
        while True:
            with errors.caught():
                try:
                    await self.look(time.monotonic())
                except (redis.RedisError, OSError) as error:
                    log.debug("the traffic cannot be read: %s", error)
            await asyncio.sleep(self._interval_s)


def _figures(record: WorkerRecord) -> WorkerFigures:
    return WorkerFigures(
        record.slot,
        pool="",
        number=0,
        role="prefill" if record.role == "prefill" else "decode",
        state=WorkerState.SERVING,
        incarnation=record.incarnation,
        sequences=record.load.running + record.load.waiting,
    )
