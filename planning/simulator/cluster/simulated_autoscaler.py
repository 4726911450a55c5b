"""Runs the real autoscaler with simulated workers: their roles follow the traffic in virtual
time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.autoscaling.autoscaler import Autoscaler, Bounds, ChangeRole
from baton.autoscaling.cluster_figures import ClusterFigures, WorkerFigures, WorkerState
from baton.autoscaling.demand import DemandReader
from baton.autoscaling.traffic import RouterTraffic, TrafficCounts, TrafficTracker
from baton.config.choices import Role
from baton.config.cluster import Config
from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.simulated_router import SimulatedRouter, record_of
from planning.simulator.cluster.simulated_worker import SimulatedWorker
from planning.simulator.cluster.workers_side import WorkersSide


@dataclass(frozen=True, slots=True)
class RoleChange:
    """A completed change of a role. Times are in virtual seconds from the trace's start."""

    begun_s: float
    took_s: float
    """Time until the worker served again in its new role, in seconds."""
    worker: str
    role: str
    """The worker's new role."""
    why: str


HEARD_S = 0.25
"""Time until a router reads in the registry that a worker leaves or has returned, in seconds. It is
the same as in ``router.dispatch.dispatcher``."""
_POLL_S = 0.02
"""Interval in seconds at which a leaving worker checks whether it still has sequences. It is the
same as in ``worker.process``."""


class SimulatedAutoscaler:
    """Runs the autoscaler on the simulated workers. Owned by the simulation."""

    def __init__(
        self,
        config: Config,
        workers: Sequence[SimulatedWorker],
        routers: Sequence[SimulatedRouter],
        side: WorkersSide,
        events: EventQueue,
        is_over: Callable[[], bool],
    ) -> None:
        """Create an autoscaler that observes the cluster until ``is_over`` returns true."""
        self.changes: list[RoleChange] = []
        self._interval_s = config.autoscaler.interval_s
        self._workers = {worker.name: worker for worker in workers}
        self._pools = {worker.name: worker.role for worker in workers}
        self._routers, self._side, self._events = routers, side, events
        self._is_over = is_over
        bounds = replace(
            Bounds.of(config.autoscaler, len(workers)),
            min_workers=len(workers),
            max_workers=len(workers),
        )
        pools: dict[Role, str] = {"prefill": "prefill", "decode": "decode"}
        self._autoscaler = Autoscaler(config.autoscaler, bounds, pools)
        self._flow = TrafficTracker()
        self._demand = DemandReader(config.slo_tpot_s)
        self._looks = 0
        self._turning = 0

    def start(self) -> None:
        """Schedule the autoscaler's first observation of the cluster."""
        self._look()

    def _look(self) -> None:
        if self._is_over():
            return
        if not self._turning:
            now = self._events.now
            actions = self._autoscaler.decide(self._figures(now), now)
            turns = [action for action in actions if isinstance(action, ChangeRole)]
            self._turning = len(turns)
            for turn in turns:
                self._turn(turn)
        self._events.after(self._interval_s, self._look)

    def _figures(self, now: float) -> ClusterFigures:
        self._looks += 1
        told = {
            f"router-{number}": RouterTraffic(
                self._looks, router.traffic.counts.since(TrafficCounts())
            )
            for number, router in enumerate(self._routers)
        }
        traffic = self._flow.look(told, now)
        records = [record_of(worker) for worker in self._workers.values()]
        figures = tuple(
            WorkerFigures(
                slot=record.slot,
                pool=self._pools[record.slot],
                number=self._workers[record.slot].number,
                role="prefill" if record.role == "prefill" else "decode",
                state=WorkerState.SERVING,
                incarnation=record.incarnation,
                sequences=record.load.running + record.load.waiting,
            )
            for record in records
        )
        demand = None if traffic is None else self._demand.read(traffic, records)
        return ClusterFigures(figures, demand)

    def _turn(self, turn: ChangeRole) -> None:
        worker, begun_s = self._workers[turn.slot], self._events.now

        def leave() -> None:
            for router in self._routers:
                router.leave_out(worker)
            empty()

        def empty() -> None:
            if self._side.is_emptied(worker):
                worker.role = turn.role
                self._events.after(HEARD_S, back)
            else:
                self._events.after(_POLL_S, empty)

        def back() -> None:
            for router in self._routers:
                router.take_back(worker)
            took_s = self._events.now - begun_s
            self.changes.append(RoleChange(begun_s, took_s, worker.name, turn.role, turn.why))
            self._turning -= 1
            if not self._turning:
                self._autoscaler.acted(self._events.now)

        self._events.after(HEARD_S, leave)
