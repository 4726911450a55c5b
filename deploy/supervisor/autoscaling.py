"""Runs the autoscaler: observes the cluster, decides, and carries decisions out.

``baton.autoscaling.autoscaler`` is the pure core that decides.

    observing ─nothing to do→ observing
    observing ─decided→ acting ─done, failed, or its deadline→ observing

Decisions are carried out one at a time. Roles change as with `baton role`, sizes as with `baton
scale`: sizes are stored where an operator's are, and the supervisor acts on them. Owned by the
supervisor's event loop. The next supervisor does not need its state.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping

import grpc.aio
import redis

from baton.autoscaling.autoscaler import Action, Autoscaler, Bounds, ChangeRole, Resize
from baton.autoscaling.cluster_figures import ROLES, ClusterFigures, WorkerFigures, WorkerState
from baton.autoscaling.demand import DemandReader
from baton.autoscaling.traffic import TrafficTracker
from baton.autoscaling.traffic_store import TrafficStore
from baton.config.choices import Role
from baton.config.cluster import Config
from baton.errors import BatonError, Unavailable, WorkerFailed
from baton.rpc.grpc_errors import error_from_rpc
from baton.rpc.worker_plane import WorkerPlane
from baton.store.registry import DRAINING, Registry, WorkerRecord
from baton.store.supervision import PoolSizes, ScalingDecision
from baton.telemetry.metrics import SupervisorMetrics
from baton.v1 import control_pb2, control_pb2_grpc
from deploy.supervisor.reconciler import Phase, split

NOTICE_S = 10.0
"""Maximum time until the supervisor acts on a pool size that was stored in Redis, in seconds."""
_POLL_S = 0.1
ChangeOneRole = Callable[[WorkerRecord, Role, float], Awaitable[float]]
Phases = Callable[[], Mapping[str, Phase]]
"""Returns the phase of each slot, as observed by the supervisor."""
KEPT_DECISIONS = 8
"""Latest decisions that the supervisor publishes. Routers keep a longer log of them."""
ANSWER_S = 10.0
"""Time for which to wait for a worker's answer after the deadline of its role change, in
seconds."""

log = logging.getLogger(__name__)


class ClusterObserver:
    """Observes a live cluster: the supervisor's slots, the workers' registry, the routers' counts.

    Owned by the supervisor's event loop.
    """

    def __init__(
        self, config: Config, registry: Registry, store: TrafficStore, phases: Phases
    ) -> None:
        self.records: Mapping[str, WorkerRecord] = {}
        """The registry's records of serving workers, by slot, as last observed."""
        self._roles = {pool.name: pool.role for pool in config.pools}
        self._registry = registry
        self._store = store
        self._phases = phases
        self._tracker = TrafficTracker()
        self._demand = DemandReader(config.slo_tpot_s)

    async def observe(self, now: float) -> ClusterFigures:
        """Return the autoscaler's input at the monotonic time ``now``.

        Raises ``redis.RedisError``, OSError.
        """
        records = await self._registry.all()
        traffic = self._tracker.look(await self._store.read(), now)
        phases = self._phases()
        ready = {one.slot: one for one in records.values() if one.state != DRAINING}
        workers = workers_of(phases, ready, self._roles)
        self.records = {one.slot: ready[one.slot] for one in workers if one.incarnation}
        # The role of a running worker that is missing in the registry is unknown.
        listed = {record.slot for record in records.values()}
        running = {one.slot for one in workers if phases[one.slot] is Phase.RUNNING}
        if traffic is None or not running <= listed or not self.records:
            return ClusterFigures(workers, None)
        return ClusterFigures(workers, self._demand.read(traffic, list(self.records.values())))

    async def forget_gone(self, now: float) -> None:
        """Delete the request counts of routers that no longer run. Never raises Redis errors."""
        try:
            await self._store.remove(self._tracker.gone(now))
        except (redis.RedisError, OSError):
            return


def workers_of(
    phases: Mapping[str, Phase],
    ready: Mapping[str, WorkerRecord],
    pools: Mapping[str, Role],
) -> tuple[WorkerFigures, ...]:
    """Return the autoscaler's figures for each slot in which a worker is wanted.

    ``ready`` has the registry records of the workers that accept requests, by slot.
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


async def change_role(
    plane: WorkerPlane, record: WorkerRecord, role: Role, deadline_s: float
) -> float:
    """Change a worker's role. Returns the seconds until it serves again.

    Requests that still run on the worker after ``deadline_s`` seconds are placed elsewhere.
    ``plane`` has the caller's credentials for calls to workers. Raises BatonError.
    """
    channel = plane.channel(record.address)
    request = control_pb2.ChangeRoleRequest(role=role, deadline_ms=int(deadline_s * 1e3))
    try:
        stub = control_pb2_grpc.ControlServiceStub(channel)
        answer = await stub.ChangeRole(request, timeout=deadline_s + ANSWER_S)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, record.incarnation) from error
    except OSError as error:
        raise WorkerFailed(f"{record.slot}: {error}") from error
    finally:
        await channel.close()
    return answer.took_ms / 1e3


class Autoscaling:
    """Observes, decides and acts, once in every interval. Owned by the supervisor's event loop."""

    def __init__(
        self,
        config: Config,
        observer: ClusterObserver,
        phases: Phases,
        sizes: PoolSizes,
        metrics: SupervisorMetrics,
        change: ChangeOneRole,
    ) -> None:
        """``change`` changes a worker's role within a deadline. It raises BatonError."""
        self._settings = config.autoscaler
        self._drain_s = config.drain_deadline_s
        self._observer = observer
        self._phases = phases
        self._sizes = sizes
        self._metrics = metrics
        self._change = change
        self._mode = "dry_run" if self._settings.dry_run else "live"
        bounds = Bounds.of(self._settings, sum(pool.count for pool in config.pools))
        pools = {pool.role: pool.name for pool in config.pools}
        self._autoscaler = Autoscaler(self._settings, bounds, pools)
        self._last = ""
        self._decisions: deque[ScalingDecision] = deque(maxlen=KEPT_DECISIONS)

    async def run(self) -> None:
        """Run the autoscaler until cancelled."""
        log.info("the autoscaler decides every %g s (%s)", self._settings.interval_s, self._mode)
        while True:
            began = time.monotonic()
            try:
                await self._once(began)
            except (redis.RedisError, OSError) as error:
                log.info("the autoscaler cannot observe the cluster: %s", error)
            except Exception:
                # Workers are still replaced without the autoscaler, but not without the supervisor.
                log.exception("the autoscaler failed")
            await asyncio.sleep(max(0.0, began + self._settings.interval_s - time.monotonic()))

    def note(self) -> str:
        """Return a text for `baton status`: what the autoscaler observes, and its last action."""
        said = f"{self._autoscaler.summary}{self._last}"
        return f"dry run: {said}" if self._settings.dry_run else said

    def decisions(self) -> tuple[ScalingDecision, ...]:
        """Return the latest decisions with their reasons, by time, and which of them failed."""
        return tuple(self._decisions)

    def _note_decision(self, text: str) -> None:
        self._decisions.append(ScalingDecision(time.time(), text))

    async def _once(self, now: float) -> None:
        seen = await self._observer.observe(now)
        actions = self._autoscaler.decide(seen, now)
        for role in ROLES:
            self._metrics.autoscaler_needed_workers.labels(role).set(self._autoscaler.needs[role])
        for action in actions:
            self._log(action)
        if actions and not self._settings.dry_run:
            await asyncio.gather(*(self._carry_out(action) for action in actions))
        if actions:
            self._autoscaler.acted(time.monotonic())
        await self._observer.forget_gone(now)

    def _log(self, action: Action) -> None:
        text = f"{words(action)} ({action.reason.value}: {action.why})"
        text = f"would: {text}" if self._settings.dry_run else text
        log.info("%s", text)
        self._note_decision(text)
        self._last = f"; last: {words(action)} at {time.strftime('%H:%M:%S')}"
        self._metrics.autoscaler_decisions.labels(
            action.name, action.reason.value, self._mode
        ).inc()

    async def _carry_out(self, action: Action) -> None:
        try:
            if isinstance(action, ChangeRole):
                record = self._observer.records[action.slot]
                took_s = await self._change(record, action.role, self._drain_s)
                log.info("%s: it took %.1f s", words(action), took_s)
            else:
                await self._resize(action)
        except (BatonError, redis.RedisError, OSError) as error:
            log.warning("%s: %s", words(action), error)
            self._note_decision(f"failed: {words(action)} ({error})")
            self._metrics.autoscaler_failures.labels(action.name).inc()

    async def _resize(self, action: Resize) -> None:
        """Store the pool's new size in Redis, and wait until the supervisor acts on it. Raises
        Unavailable if another size is stored already, or if the supervisor does not act in time."""
        count = self._count(action.pool)
        if (await self._sizes.read()).get(action.pool, count) != count:
            raise Unavailable(f"{action.pool} has just got another size")
        await self._sizes.write(action.pool, count + action.by)
        deadline = time.monotonic() + NOTICE_S
        # The supervisor looks every half second. The next decision must come after that.
        while self._count(action.pool) == count:
            if time.monotonic() > deadline:
                raise Unavailable("the supervisor has not acted on it yet")
            await asyncio.sleep(_POLL_S)

    def _count(self, pool: str) -> int:
        """Return the number of workers that are wanted in a pool."""
        return sum(
            split(slot)[0] == pool and phase is not Phase.LEAVING
            for slot, phase in self._phases().items()
        )


def words(action: Action) -> str:
    """Return a description of the action for messages."""
    if isinstance(action, ChangeRole):
        return f"{action.slot} becomes a {action.role} worker"
    return f"{action.pool} {'gets' if action.by > 0 else 'loses'} a worker"
