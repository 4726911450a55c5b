"""Looks at a live cluster for the autoscaler. Owned by the supervisor's event loop."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import redis

from baton.autoscaling.cluster_figures import ClusterFigures, WorkerFigures, WorkerState
from baton.autoscaling.demand import DemandReader
from baton.autoscaling.traffic import TrafficTracker
from baton.autoscaling.traffic_store import TrafficStore
from baton.config.cluster import Config, Role
from baton.store.registry import DRAINING, Registry, WorkerRecord
from deploy.supervisor.pool_keeper import Phase
from deploy.supervisor.wanted_slots import split

Phases = Callable[[], Mapping[str, Phase]]
"""The state of each slot, as the supervisor sees it."""


class ClusterLook:
    """Three sources: the supervisor's slots, the workers' registry, what routers have counted."""

    def __init__(
        self, config: Config, registry: Registry, board: TrafficStore, phases: Phases
    ) -> None:
        self.records: Mapping[str, WorkerRecord] = {}
        """By slot, of the workers that serve, as of the last look."""
        self._roles = {pool.name: pool.role for pool in config.pools}
        self._registry = registry
        self._board = board
        self._phases = phases
        self._flow = TrafficTracker()
        self._demand = DemandReader(config.slo_tpot_s)

    async def look(self, now: float) -> ClusterFigures:
        """``now`` on the monotonic clock. Raises ``redis.RedisError``, OSError."""
        records = await self._registry.all()
        told = await self._board.read()
        traffic = self._flow.look(told, now)
        phases = self._phases()
        ready = {one.slot: one for one in records.values() if one.state != DRAINING}
        workers = workers_of(phases, ready, self._roles)
        self.records = {one.slot: ready[one.slot] for one in workers if one.incarnation}
        # While a worker that runs is not in the registry, nobody knows its role.
        listed = {record.slot for record in records.values()}
        running = {one.slot for one in workers if phases[one.slot] is Phase.RUNNING}
        if traffic is None or not running <= listed or not self.records:
            return ClusterFigures(workers, None)
        return ClusterFigures(workers, self._demand.read(traffic, list(self.records.values())))

    async def forget_gone(self, now: float) -> None:
        """Strike off routers that will not speak again. Never raises what Redis does."""
        try:
            await self._board.remove(self._flow.gone(now))
        except (redis.RedisError, OSError):
            return


def workers_of(
    phases: Mapping[str, Phase],
    ready: Mapping[str, WorkerRecord],
    pools: Mapping[str, Role],
) -> tuple[WorkerFigures, ...]:
    """A line for each slot in which a worker is wanted.

    ``ready`` are the records, by slot, of workers that take requests.
    """
    found = []
    for slot, phase in sorted(phases.items()):
        pool, number = split(slot)
        if phase is Phase.LEAVING or pool not in pools:
            continue
        record = ready.get(slot) if phase is Phase.RUNNING else None
        if record is not None:
            role: Role = "prefill" if record.role == "prefill" else "decode"
            load = record.load.running + record.load.waiting
            state = WorkerState.SERVING
            found.append(WorkerFigures(slot, pool, number, role, state, record.incarnation, load))
        else:
            fails = phase is Phase.CRASH_LOOP
            state = WorkerState.FAILED if fails else WorkerState.STARTING
            found.append(WorkerFigures(slot, pool, number, pools[pool], state))
    return tuple(found)
