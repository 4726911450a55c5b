"""One worker process, whichever role it plays.

    starting ─start()→ ready ─stop()→ stopping → gone
    ready ─drain()→ draining (takes nothing more) ─nothing left, or the deadline→ stopping
    ready ─change_role()→ draining → ready, in the other role
    ready, draining ─a background task breaks, a rank is lost→ failed (run() raises)
    any after start() ─the device is lost, steps fail in a row, a rank is lost on a CUDA device→
        the process ends at once
    ready ─it stood still, and the registry says that its lease lapsed→ ready, in another life
    ready ─its lease lapsed while it could not renew it→ leaving
    leaving ─nothing runs any more, or LEAVE_S are over→ ready, in another life

A life (``worker/life.py``) is what has an incarnation. What has an engine outlives it: weights,
cached blocks and the tiers behind them, metrics.

Everything but the engine's steps and the copying of blocks runs on one event loop. What keeps
promises to peers never waits for Redis: the registry entry has a task of its own
(``worker/registry/own_entry.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import replace

import redis
import torch
from prometheus_client import CollectorRegistry

from baton.config.cluster import Config
from baton.config.pools import PoolConfig
from baton.errors import InvalidRequest, Unavailable, WorkerFailed
from baton.host.background import end_tasks, watch_loop
from baton.host.process_end import Fail, fail
from baton.liveness.listening import ListeningClock
from baton.store.redis_client import redis_client
from baton.store.registry import DRAINING, Registry, WorkerRecord
from baton.telemetry.metrics_server import MetricsServer
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.engine import Engine
from engine.parallel.ranks import Leader
from engine.roofline import Ceilings
from worker.core.engine_core import ENGINE_HANG_S, EngineCore
from worker.core.gauges import UtilizationMeter, WorkerGauges
from worker.core.prefill_budget import PrefillBudget
from worker.cores.core_board import CoreBoard
from worker.costs.step_costs import StepCosts
from worker.device.device import DeviceWatch, use_device
from worker.device.pool_memory import PoolMemory
from worker.device.process_tuning import keep_buffers, spare_the_interpreter
from worker.engine_start import Measure, StartEngine, core_board, measure, start_engine
from worker.life import Lasting, Life
from worker.offload.kv_tiers import KvTiers, make_storages
from worker.registry.own_entry import OwnEntry
from worker.role import RoleFactory, WorkerContext
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

PUBLISH_EVERY_S = 0.05
"""How often changes of the cache are sent to the prefix index."""
_PUBLISH_REST = 10
"""Between two calls it rests this many times as long as the last one took, up to a heartbeat."""
_CHECK_REST = 100
"""Between two looks at all blocks, which hold up the event loop, it rests this many times as long
as the last one took: half a million of a tiny model's blocks take a tenth of a second and more."""
STOP_DEADLINE_S = 10.0
"""The longest that stopping waits for anything."""
LEAVE_S = 30.0
"""How long sequences may run on in a life that Redis has given up, before they end with it."""
SEEN_S = 1.0
"""Routers read the registry four times a second. Until they have seen that a worker leaves, it is
there to refuse what they send: to somebody who finds nobody, it has died."""
_TRANSFER_THREADS = 2
_BEATS = 4
"""So many times in a heartbeat the event loop looks whether it stood still."""
_DRAIN_POLL_S = 0.02
_REASON_S = 2.0


class WorkerProcess:
    """Builds the engine, serves gRPC and metrics, and keeps the registry entry alive."""

    def __init__(
        self,
        settings: WorkerSettings,
        roles: Mapping[str, RoleFactory],
        start_engine: StartEngine = start_engine,
        measure: Measure = measure,
        fail: Fail = fail,
    ) -> None:
        """``roles`` maps a pool's role to what is mounted for it; ``start_engine`` makes the

        engine, and ``measure`` tells what its steps cost. ``fail`` ends the process at once, with
        a reason; it is called on any thread.
        """
        self.settings = settings
        self._start_engine, self._measure = start_engine, measure
        self._fail = fail
        self.drained = False
        """Whether it ends because it was told to by way of a drain."""
        self.leave_by: float | None = None
        """Once a drain has begun: until when what is here may run; monotonic, in seconds."""
        self.beats = 0
        """Heartbeats so far; other threads may look at it."""
        self._roles = roles
        self._started_life: Life | None = None
        self._changing = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._left_nothing = False
        self._redis = redis_client(settings.redis_url)
        self._entry = OwnEntry(
            Registry(self._redis, settings.cluster_id),
            ttl_s=settings.config.advanced.registry_ttl_s,
            heartbeat_s=settings.config.advanced.heartbeat_s,
            record=self._present_record,
            timed=self._timed_call,
            lost=self._lost_entry,
        )
        self._leave_by: float | None = None
        """Until when this life may go on that has lost its entry; monotonic, in seconds."""
        self._condemned = asyncio.Event()
        """Set when the registry has said that this life is over: it ends at once where it may."""
        self._memory = PoolMemory(shared=settings.config.transport in ("auto", "shm"))
        self._next_check_at = 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = asyncio.Event()
        ranks = settings.pool.ranks
        self.lead = Leader(settings.group_host, ranks) if ranks > 1 else None
        """Its hold on its other ranks, which are to be told ``lead.address``."""

    @property
    def life(self) -> Life:
        """The present one, of a worker that has started."""
        assert self._started_life is not None, "not started"
        return self._started_life

    @property
    def record(self) -> WorkerRecord | None:
        """What the registry knows of its life; None before it has started."""
        return None if self._started_life is None else self._started_life.record

    @property
    def context(self) -> WorkerContext | None:
        """What its role has; None before it has started."""
        return None if self._started_life is None else self._started_life.context

    # Its beginning and its end

    async def start(self) -> WorkerRecord:
        """Load the model, serve, register. Raises BatonError.

        Where Redis is away it serves nobody yet: a heartbeat registers it later.
        """
        settings = self.settings
        board = self._cores = core_board(settings)
        engine, costs = await self._load(board)
        device = engine.runner.device
        use_device(device)
        self._transfers = ThreadPoolExecutor(_TRANSFER_THREADS, "transfer", use_device, (device,))
        self._device_watch = DeviceWatch(device, self._end)
        metrics = WorkerMetrics(CollectorRegistry())
        pool = settings.pool
        meter = _utilization_meter(engine, pool)
        gauges = WorkerGauges(metrics, settings.slot, pool.role, pool.price_per_hour, meter)
        self._gauges = gauges
        budget = PrefillBudget(costs, settings.config.slo_tpot_s)
        tiers = await self._make_tiers(engine, costs, metrics)
        core = EngineCore(engine, gauges, "", board, budget, tiers, fail=self._end)
        # serves /metrics from a thread of its own; ended in stop()
        tls = settings.config.tls.of("worker")
        self._metrics_server = MetricsServer(settings.host, metrics.registry, tls)
        self._lasting = Lasting(
            core,
            self._memory.of(engine.cache),
            metrics,
            self._metrics_server.port,
            tiers,
            costs,
            self._transfers,
            ListeningClock(2 * settings.config.advanced.heartbeat_s / _BEATS),
            self.lead.addresses() if self.lead is not None and settings.pool.tp > 1 else (),
        )
        await self._begin_life()
        core.start()
        if self._lasting.tiers is not None:
            self._lasting.tiers.start()
        await self._entry.tell()
        self._tasks = [
            asyncio.create_task(self._heartbeat(), name="heartbeat"),
            asyncio.create_task(self._entry.keep(), name="registry-entry"),
            asyncio.create_task(self._publish(), name="publish"),
            asyncio.create_task(self._watch_itself(), name="own-lease"),
            asyncio.create_task(watch_loop(gauges.loop_lag), name="loop-lag"),
        ]
        if self._lasting.tiers is not None:
            self._tasks.append(asyncio.create_task(self._lasting.tiers.run(), name="tier-spill"))
        if self.lead is not None:
            self._mind_ranks(self.lead, device)
        self._device_watch.start()
        spare_the_interpreter()
        keep_buffers()
        return self.life.record

    async def _load(self, board: CoreBoard | None) -> tuple[Engine, StepCosts]:
        """The engine, and what its steps cost. Raises BatonError."""
        settings, lead, allocate = self.settings, self.lead, self._memory.allocate
        try:
            engine = await asyncio.to_thread(self._start_engine, settings, allocate, lead)
            return engine, await asyncio.to_thread(self._measure, settings, engine, board)
        except WorkerFailed as error:
            # Why a rank has ended comes a moment after the breaking of its connections.
            if lead is not None:
                await asyncio.wait([asyncio.wrap_future(lead.lost)], timeout=_REASON_S)
                if lead.lost.done():
                    raise WorkerFailed(lead.lost.result()) from error
            raise

    def _mind_ranks(self, lead: Leader, device: torch.device) -> None:
        """From now on a lost rank ends the worker."""
        if device.type == "cuda":
            # At once, on the thread that has noticed: the GPU may be inside a collective operation
            # that never ends, and whatever stops in order would wait for it.
            lead.lost.add_done_callback(lambda lost: self._end(lost.result().splitlines()[0]))
        else:
            self._tasks.append(asyncio.create_task(self._watch_ranks(lead), name="ranks"))

    async def _watch_ranks(self, lead: Leader) -> None:
        """Raises WorkerFailed when a rank is lost."""
        raise WorkerFailed(await asyncio.wrap_future(lead.lost))

    async def _make_tiers(
        self, engine: Engine, costs: StepCosts, metrics: WorkerMetrics
    ) -> KvTiers | None:
        """Behind the pool, where the configuration has any. Raises ConfigError."""
        storages = await asyncio.to_thread(
            make_storages, self.settings.config, engine.cache.block_bytes
        )
        if not storages:
            return None
        return KvTiers(
            engine,
            storages,
            lambda: self._memory.of(engine.cache),
            costs,
            metrics,
            worker=self.settings.slot,
            role=self.settings.pool.role,
        )

    async def run(self) -> None:
        """Return once stopped; raise what broke a background task."""
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait(
                [stopped, *self._tasks], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                # Those that stop() has cancelled may have ended before this is woken.
                if not (task is stopped or (task.cancelled() and self._stopped.is_set())):
                    task.result()
        finally:
            stopped.cancel()

    def _end(self, reason: str) -> None:
        """End the process at once. On any thread."""
        self._fail(f"worker {self.settings.slot} ends: {reason}")

    async def ended(self) -> None:
        """Wait until a drain's last act is over, where there was one."""
        if self._ending is not None:
            await self._ending

    async def stop(self) -> None:
        """Leave the registry, end what is under way, stop serving; idempotent."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        await end_tasks(self._tasks)
        if self._started_life is not None:
            await self._end_life()
            if self._lasting.tiers is not None:
                await self._lasting.tiers.stop(STOP_DEADLINE_S)
            await asyncio.to_thread(self._lasting.core.stop, STOP_DEADLINE_S)
            await asyncio.to_thread(self._metrics_server.stop)
            self._transfers.shutdown(wait=True, cancel_futures=True)
            # Until here a lost device still ends the process, rather than hold up what stops.
            self._device_watch.stop()
        if self.lead is not None:
            await asyncio.to_thread(self.lead.close)
        await self._redis.aclose()
        self._memory.close()

    # Its lives

    async def _begin_life(self) -> None:
        self._started_life = await Life.begin(
            self.settings, self._lasting, self._roles, self, self._redis
        )
        self._entry.begin()
        self._leave_by = None

    async def _take_new_life(self, reason: str) -> None:
        """Begin anew with the same engine. Raises TimeoutError where it cannot be freed."""
        old = self.life
        log.warning("%s ends: %s", old.context.incarnation, reason)
        await self._end_life()
        async with asyncio.timeout(STOP_DEADLINE_S):
            # Steps and copies that are under way tell the loop when they have ended.
            while not old.is_over:  # noqa: ASYNC110
                await asyncio.sleep(_DRAIN_POLL_S)
        await self._begin_life()

    async def _end_life(self) -> None:
        """Leave the registry, and end whatever runs, with an error."""
        await self._entry.strike_off()
        await self.life.end()

    async def _live_on(self, now: float) -> None:
        """Begin another life, where the registry has said that this one is over."""
        if self.drained or self._leave_by is None:
            return
        if now >= self._leave_by or self.life.is_empty:
            await self._take_new_life("the registry says that its lease has lapsed")

    async def _watch_itself(self) -> None:
        """Notice that the process stood still, as soon as it goes on."""
        while True:
            await asyncio.sleep(self.settings.config.advanced.heartbeat_s / _BEATS)
            self._lasting.clock.tick()
            self._entry.beat(time.monotonic())

    # Leaving, or coming back as another

    async def drain(self, deadline_s: float) -> bool:
        """Take nothing more, wait for the end of what is here, then stop; idempotent.

        Returns whether nothing was left by the deadline. What is left ends with an error, after
        which routers place it elsewhere.
        """
        if self.leave_by is None:
            self.leave_by = time.monotonic() + deadline_s
        async with self._changing:
            if self._ending is None:
                self._left_nothing = await self._empty(lambda: self.leave_by or 0.0, SEEN_S)
                self.drained = True
                # By itself: whoever has asked is still to be answered, by the server that stops.
                self._ending = asyncio.create_task(self.stop(), name="stop")
        return self._left_nothing

    def hurry(self) -> None:
        """Have a drain end now."""
        self.leave_by = time.monotonic()

    async def change_role(self, role: str, deadline_s: float) -> float:
        """Come back as the other role, with what is loaded and cached; the seconds that it took.

        Raises InvalidRequest for a role that there is not, or that its ranks cannot play, and
        Unavailable for a worker that stops.
        """
        if role not in self._roles:
            raise InvalidRequest(f"role {role!r} is unknown; known: {', '.join(self._roles)}")
        pool = self.settings.pool
        if pool.cp > 1 and role != pool.role:
            # What a handoff brings would be on rank 0 alone.
            raise InvalidRequest(
                f"a worker of {pool.cp} ranks that divide prompts (cp) does nothing but prefill:"
                " give another worker the role"
            )
        began = time.monotonic()
        async with self._changing:
            if self._stopped.is_set() or self.drained:
                raise Unavailable("this worker is stopping")
            if role != self.settings.pool.role:
                end = time.monotonic() + deadline_s
                await self._empty(lambda: end, 0.0)
                if self._leave_by is not None:
                    # The entry has lapsed meanwhile: what was promised to this life is over.
                    await self._take_new_life("the registry says that its lease has lapsed")
                await self._turn(role)
        return time.monotonic() - began

    async def _empty(self, deadline: Callable[[], float], at_least_s: float) -> bool:
        """Whether nothing is left by the deadline, which may change, of what was taken before."""
        life = self.life
        self._take_nothing_more()
        # Not waited for: Redis may hang for longer than the deadline.
        self._entry.tell_soon()
        seen_at = time.monotonic() + at_least_s
        # Sequences, tickets, calls and readers end in many places, and nobody hurries.
        while (now := time.monotonic()) < deadline():
            if now >= seen_at and life.is_empty:
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        return life.is_empty

    def _take_nothing_more(self) -> None:
        life = self.life
        life.context.intake.close()
        life.record = replace(life.record, state=DRAINING)

    async def _turn(self, name: str) -> None:
        life = self.life
        await life.close_role()
        await self._steps_ended(life.context)
        pool = pool_for(self.settings.config, self.settings.pool, name)
        self.settings = replace(self.settings, pool=pool)
        life.turn(self.settings)
        self._gauges.change_role(name)
        if self._cores is not None:
            self._cores.take_turn(yields=name == "prefill")
        await self._entry.tell()
        log.info("%s is a %s worker now", life.record.incarnation, name)

    async def _steps_ended(self, context: WorkerContext) -> None:
        """Wait for running steps: they may have sequences that the deadline ended.

        Raises WorkerFailed where the engine hangs: then the process ends.
        """
        end = time.monotonic() + ENGINE_HANG_S
        while not context.core.scheduler.is_idle():
            if time.monotonic() >= end:
                reason = "its engine has not ended the steps of its last role"
                self._end(reason)
                raise WorkerFailed(reason)
            await asyncio.sleep(_DRAIN_POLL_S)

    # What it does all the while

    async def _heartbeat(self) -> None:
        """Renew what was promised, and end what has expired.

        Waits for Redis only between two lives, and then for 2 s at most: peers must not consider
        this worker dead because Redis is slow.
        """
        heartbeat_s = self.settings.config.advanced.heartbeat_s
        while True:
            began = time.monotonic()
            self._condemned.clear()
            if not self._changing.locked():
                # One that is being drained, or changes its role, ends that first.
                async with self._changing:
                    await self._live_on(began)
            context = self.life.context
            context.exchange.heartbeat()
            context.exchange.check_ranks()
            await self.life.role.heartbeat()
            self._refresh(context)
            self._check_integrity(context)
            self.beats += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(began + heartbeat_s - time.monotonic()):
                    await self._condemned.wait()

    def _refresh(self, context: WorkerContext) -> None:
        """Blocks are given back without a step, too."""
        core, exchange = context.core, context.exchange
        self._gauges.refresh(core.scheduler, core.pool)
        self._gauges.transfers(exchange.pairs(), exchange.in_flight_bytes, exchange.staging())
        self._gauges.show_utilization()

    def _present_record(self) -> WorkerRecord:
        life = self.life
        return replace(life.record, load=life.context.core.load())

    def _timed_call(self) -> AbstractContextManager[None]:
        return self._gauges.registry_calls.one()

    def _lost_entry(self, stood_still: bool) -> None:
        """Take nothing more: to all others this life is over."""
        self._take_nothing_more()
        # Routers have given up one that stood still. One that did not was within their reach.
        self._leave_by = time.monotonic() + (0.0 if stood_still else LEAVE_S)
        self._condemned.set()

    def _check_integrity(self, context: WorkerContext) -> None:
        """When nothing runs, nothing is used."""
        began = time.monotonic()
        if began < self._next_check_at:
            return
        is_idle = context.core.scheduler.is_idle() and context.exchange.is_idle()
        if is_idle and (context.tiers is None or context.tiers.is_idle):
            pool = context.engine.pool
            pool.check()
            counts = pool.counts()
            assert counts.used == counts.quarantined == 0, f"blocks leaked: {counts}"
            self._next_check_at = began + _CHECK_REST * (time.monotonic() - began)

    async def _publish(self) -> None:
        verify_every = max(1, int(self.settings.config.advanced.heartbeat_s / PUBLISH_EVERY_S))
        count = 0
        told_at = time.monotonic()
        while True:
            count += 1
            took = 0.0
            publisher = self.life.publisher
            try:
                began = time.monotonic()
                with self._gauges.index_calls.one():
                    await publisher.publish(verify=count % verify_every == 0)
                told_at = time.monotonic()
                took = told_at - began
                self._gauges.index_told(publisher.pending_blocks, took)
            except redis.RedisError as error:
                log.warning("the prefix index cannot be reached: %s", error)
                self._gauges.index_told(publisher.pending_blocks, time.monotonic() - told_at)
                await asyncio.sleep(self.settings.config.advanced.heartbeat_s)
            # Where many workers keep the server busy, each asks for less of it.
            rest = min(_PUBLISH_REST * took, self.settings.config.advanced.heartbeat_s)
            await asyncio.sleep(max(PUBLISH_EVERY_S, rest))


def _utilization_meter(engine: Engine, pool: PoolConfig) -> UtilizationMeter | None:
    """None for an engine without weights: the work of its steps is not known."""
    if engine.storage is None:
        return None
    # The figures are one device's.
    peaks = Ceilings(pool.peak_gb_per_s * 1e9 * pool.ranks, pool.peak_gflops * 1e9 * pool.ranks)
    return UtilizationMeter(engine.config, engine.storage, peaks if pool.peak_gflops else None)


def pool_for(config: Config, own: PoolConfig, role: str) -> PoolConfig:
    """What a worker of the pool ``own`` is once it plays ``role``: of the first pool that does,

    with the memory and the threads that it has.
    """
    same = (pool.name for pool in config.pools if pool.role == role)
    return own.model_copy(update={"name": next(same, role), "role": role})
