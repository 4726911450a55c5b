"""One worker process, whichever role it plays.

    starting ─start()→ ready ─stop()→ stopping → gone
    ready ─drain()→ draining (takes nothing more) ─nothing left, or the deadline→ stopping
    ready ─change_role()→ draining → ready, in the other role
    ready, draining ─a background task breaks→ failed (run() raises)
    ready ─its lease lapsed while it stood still→ ready, in another life
    ready ─its lease lapsed while it could not renew it→ leaving
    leaving ─nothing runs any more, or LEAVE_S are over→ ready, in another life

A life is what has an incarnation: a server on a port of its own, a role, pairs with others and
tickets, and an entry in the registry and in the index. What has an engine outlives it: weights,
cached blocks and the tiers behind them, metrics.

Everything but the engine's steps and the copying of blocks runs on one event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import gc
import logging
import secrets
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import redis
from prometheus_client import CollectorRegistry, start_http_server

from baton.background import end_tasks
from baton.config import MIB, Config, PoolConfig
from baton.errors import InvalidRequest, Unavailable
from baton.grpc_channel import make_server
from baton.metrics import WorkerMetrics
from baton.prefix_index import PrefixIndex
from baton.redis_client import redis_client
from baton.registry import DRAINING, Registry, WorkerRecord
from baton.v1 import cache_pb2_grpc, control_pb2_grpc, transfer_pb2_grpc
from engine.engine import Engine
from kvtransfer.memory import BlockMemory
from kvtransfer.pair import Identity, PairLimits
from worker.block_receiver import BlockReceiver
from worker.cache_service import CacheServicer
from worker.calibration import Measure, alone, calibrate
from worker.chunk_slack import ChunkSlack
from worker.control_loop import ControlLoop
from worker.control_service import ControlServicer
from worker.cores import CoreBoard, host_cores
from worker.engine_builder import BuildEngine, build_worker_engine
from worker.engine_thread import run_sharing
from worker.exchange import Exchange
from worker.gauges import WorkerGauges
from worker.index_publisher import IndexPublisher
from worker.intake import Intake
from worker.kv_tiers import KvTiers, make_storages
from worker.mounting import Mounting
from worker.own_lease import OwnLease
from worker.pool_memory import PoolMemory
from worker.role import RoleFactory, WorkerContext
from worker.settings import WorkerSettings
from worker.step_costs import StepCosts
from worker.transfer_service import TransferServicer
from worker.transports import make_transports

log = logging.getLogger(__name__)

PUBLISH_EVERY_S = 0.05
"""How often changes of the cache are sent to the prefix index."""
_PUBLISH_REST = 10
"""Between two calls it rests this many times as long as the last one took, up to a heartbeat."""
STOP_DEADLINE_S = 10.0
"""The longest that stopping waits for anything."""
LEAVE_S = 30.0
"""How long sequences may run on in a life that Redis has given up, before they end with it."""
_TRANSFER_THREADS = 2
_BEATS = 4
"""So many times in a heartbeat the event loop looks whether it stood still."""
_DRAIN_POLL_S = 0.02
SEEN_S = 1.0
"""Routers read the registry four times a second. Until they have seen that a worker leaves, it is
there to refuse what they send: to somebody who finds nobody, it has died."""


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_SWITCH_INTERVAL_S = 0.0005
"""How long one thread may keep the interpreter from another: a decode step that has ended must not
wait the default 5 ms for the event loop to let go."""


class WorkerProcess:
    """Builds the engine, serves gRPC and metrics, and keeps the registry entry alive."""

    def __init__(
        self,
        settings: WorkerSettings,
        roles: Mapping[str, RoleFactory],
        build: BuildEngine = build_worker_engine,
        measure: Measure = calibrate,
    ) -> None:
        """``roles`` maps a pool's role to what is mounted for it; ``build`` makes the engine, and

        ``measure`` tells what its steps cost.
        """
        self.settings = settings
        self._build, self._measure = build, measure
        self.record: WorkerRecord | None = None
        self.context: WorkerContext | None = None
        self._roles = roles
        self._changing = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self.drained = False
        """Whether it ends because it was told to by way of a drain."""
        self.leave_by: float | None = None
        """Once a drain has begun: until when what is here may run; monotonic, in seconds."""
        self._left_nothing = False
        self.beats = 0
        """Heartbeats so far; other threads may look at it."""
        self._redis = redis_client(settings.redis_url)
        self._registry = Registry(self._redis, settings.cluster_id)
        self._lease = OwnLease(settings.config.registry_ttl_s, settings.config.heartbeat_s)
        self._leave_by: float | None = None
        """Until when this life may go on that has lost its entry; monotonic, in seconds."""
        self._awake = asyncio.Event()
        """Set when the process has stood still for too long."""
        self._memory = PoolMemory(shared=settings.config.transport in ("auto", "shm"))
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = asyncio.Event()
        self._transfers = ThreadPoolExecutor(_TRANSFER_THREADS, thread_name_prefix="transfer")

    async def start(self) -> WorkerRecord:
        """Load the model, serve, register. Raises BatonError or ``redis.RedisError``."""
        board = self._cores = self._board()
        engine = await asyncio.to_thread(self._build, self.settings, self._memory.allocate)
        costs = await asyncio.to_thread(self._calibrate, engine, board)
        metrics = WorkerMetrics(CollectorRegistry())
        gauges = WorkerGauges(metrics, self.settings.slot, self.settings.pool.role)
        slack = ChunkSlack(costs, self.settings.config.slo_tpot_s)
        control = ControlLoop(engine, gauges, "", board, slack)
        # serves /metrics from a thread of its own; ended in stop()
        self._metrics_server, self._metrics_thread = start_http_server(
            0, self.settings.host, registry=metrics.registry
        )
        self._gauges, self._costs = gauges, costs
        tiers = await self._make_tiers(control, costs, metrics)
        memory = self._memory.of(engine.cache)
        record = await self._begin_life(control, memory, metrics, tiers)
        control.start(self._role)
        if tiers is not None:
            tiers.start()
        assert self.context is not None, "its life has begun"
        # Where Redis is away, a heartbeat registers it later.
        await self._renew(self.context)
        self._tasks = [
            asyncio.create_task(self._heartbeat(), name="heartbeat"),
            asyncio.create_task(self._publish(), name="publish"),
            asyncio.create_task(self._watch_itself(), name="own-lease"),
        ]
        if tiers is not None:
            self._tasks.append(asyncio.create_task(tiers.run(), name="tier-spill"))
        spare_the_interpreter()
        keep_buffers()
        return record

    async def _begin_life(
        self,
        control: ControlLoop,
        memory: BlockMemory,
        metrics: WorkerMetrics,
        tiers: KvTiers | None,
    ) -> WorkerRecord:
        """Serve under a new incarnation, which is not registered yet."""
        incarnation = f"{self.settings.slot}:{secrets.token_hex(6)}"
        engine, server = control.engine, make_server()
        exchange = self._make_exchange(engine, memory, metrics, incarnation)
        if tiers is not None:
            exchange.behind = tiers.loader
        self.context = WorkerContext(
            settings=self.settings,
            engine=engine,
            control=control,
            memory=memory,
            exchange=exchange,
            metrics=metrics,
            incarnation=incarnation,
            tiers=tiers,
        )
        # The role adds its own, and takes them along when it goes.
        self._own_listeners = len(exchange.receiver.listeners)
        role = self._roles[self.settings.pool.role](self.context)
        self._mounting = Mounting()
        role.mount(self._mounting)  # type: ignore[arg-type]
        server.add_generic_rpc_handlers((self._mounting,))
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(self), server)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(TransferServicer(exchange), server)
        books = None if tiers is None else tiers.tiers
        cache_pb2_grpc.add_CacheServiceServicer_to_server(CacheServicer(engine.pool, books), server)
        port = server.add_insecure_port(f"{self.settings.host}:0")
        exchange.address = f"{self.settings.host}:{port}"
        control.begin_life(incarnation, role)
        await server.start()
        self._server, self._role = server, role
        self.record = self._make_record(engine, self._costs, incarnation, port)
        index = PrefixIndex(
            self._redis,
            self.settings.cluster_id,
            memory_bytes=self.settings.config.index_mib * MIB,
        )
        self._publisher = IndexPublisher(index, books or engine.pool, incarnation)
        self._lease.begin()
        self._leave_by = None
        log.info("%s serves on %s", incarnation, self.record.address)
        return self.record

    async def _end_life(self) -> None:
        """Leave the registry; whatever runs ends with an error, or has ended."""
        assert self.context is not None, "not started"
        with contextlib.suppress(redis.RedisError):
            await self._registry.remove(self.context.incarnation)
        await self._role.close()
        await self.context.exchange.close()
        await self._server.stop(grace=1.0)

    async def _take_new_life(self, reason: str) -> None:
        """Begin anew with the same engine. Raises TimeoutError where it cannot be freed."""
        assert self.context is not None, "not started"
        context = self.context
        log.warning("%s ends: %s", context.incarnation, reason)
        await self._end_life()
        async with asyncio.timeout(STOP_DEADLINE_S):
            # Steps and copies that are under way tell the loop when they have ended.
            while not _is_free(context):  # noqa: ASYNC110
                await asyncio.sleep(_DRAIN_POLL_S)
        await self._begin_life(context.control, context.memory, context.metrics, context.tiers)

    async def _make_tiers(
        self, control: ControlLoop, costs: StepCosts, metrics: WorkerMetrics
    ) -> KvTiers | None:
        """Behind the pool, where the configuration has any. Raises ConfigError."""
        engine = control.engine
        storages = await asyncio.to_thread(
            make_storages, self.settings.config, engine.cache.block_bytes
        )
        if not storages:
            return None
        tiers = KvTiers(
            engine,
            storages,
            lambda: self._memory.of(engine.cache),
            costs,
            metrics,
            worker=self.settings.slot,
            role=self.settings.pool.role,
            pump=control.pump,
        )
        control.tiers = tiers
        return tiers

    def _make_exchange(
        self, engine: Engine, memory: BlockMemory, metrics: WorkerMetrics, incarnation: str
    ) -> Exchange:
        config = self.settings.config
        receiver = BlockReceiver(
            engine.pool, metrics, block_bytes=memory.block_bytes, lease_s=config.lease_s
        )
        transports = make_transports(
            config, memory, incarnation, self.settings.host, self._transfers
        )
        limits = PairLimits(window_bytes=config.transfer_window_mib * MIB, silence_s=config.lease_s)
        identity = Identity(incarnation, engine.fingerprint, engine.cache.geometry())
        return Exchange(identity, transports, receiver, limits, self._transfers)

    def _board(self) -> CoreBoard | None:
        settings = self.settings
        if not settings.core_board:
            return None
        path = Path(settings.core_board)
        return CoreBoard(
            path,
            settings.number,
            settings.core_lines or settings.workers_here,
            host_cores(),
            yields=settings.pool.role == "prefill",
        )

    def _calibrate(self, engine: Engine, board: CoreBoard | None) -> StepCosts:
        """Measure the engine's steps as the engine thread, which has not started, will run them."""
        lock = None
        if board is not None:
            lock = Path(f"{self.settings.core_board}.calibration")
        with alone(lock):
            costs = self._measure(engine, partial(run_sharing, engine.runner, board))
        log.info("%s: steps cost %s", self.settings.slot, costs)
        return costs

    def _make_record(
        self, engine: Engine, costs: StepCosts, incarnation: str, port: int
    ) -> WorkerRecord:
        return WorkerRecord(
            incarnation=incarnation,
            slot=self.settings.slot,
            role=self.settings.pool.role,
            address=f"{self.settings.host}:{port}",
            metrics_address=f"{self.settings.host}:{self._metrics_server.server_port}",
            model=self.settings.model_name,
            fingerprint=engine.fingerprint,
            geometry=engine.cache.geometry(),
            context_length=engine.context_length,
            total_blocks=engine.pool.total,
            max_sequences=self.settings.pool.max_sequences,
            pool=self.settings.pool.name,
            prefill_cost=costs.prefill,
            step_cost=costs.step,
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
        if self.record is not None:
            assert self.context is not None, "there is a record, so there is a context"
            await self._end_life()
            if self.context.tiers is not None:
                await self.context.tiers.stop(STOP_DEADLINE_S)
            await asyncio.to_thread(self.context.control.stop, STOP_DEADLINE_S)
            await asyncio.to_thread(self._metrics_server.shutdown)
            self._metrics_server.server_close()
            self._metrics_thread.join(STOP_DEADLINE_S)
        await self._redis.aclose()
        self._memory.close()
        self._transfers.shutdown(wait=True, cancel_futures=True)

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

        Raises InvalidRequest for a role that there is not, Unavailable for a worker that stops.
        """
        if role not in self._roles:
            raise InvalidRequest(f"role {role!r} is unknown; known: {', '.join(self._roles)}")
        began = time.monotonic()
        async with self._changing:
            if self._stopped.is_set() or self.drained:
                raise Unavailable("this worker is stopping")
            if role != self.settings.pool.role:
                end = time.monotonic() + deadline_s
                await self._empty(lambda: end, 0.0)
                await self._turn(role)
        return time.monotonic() - began

    async def _empty(self, deadline: Callable[[], float], at_least_s: float) -> bool:
        """Whether nothing is left by the deadline, which may change, of what was taken before."""
        assert self.context is not None, "not started"
        assert self.record is not None, "not started"
        self.context.intake.close()
        self.record = replace(self.record, state=DRAINING)
        await self._renew(self.context)
        seen_at = time.monotonic() + at_least_s
        # Sequences, tickets, calls and readers end in many places, and nobody hurries.
        while (now := time.monotonic()) < deadline():
            if now >= seen_at and self._is_empty(self.context):
                break
            await asyncio.sleep(_DRAIN_POLL_S)
        return self._is_empty(self.context)

    def _is_empty(self, context: WorkerContext) -> bool:
        idle = context.control.scheduler.is_idle() and context.exchange.is_idle()
        return idle and not context.intake.under_way

    async def _turn(self, name: str) -> None:
        assert self.context is not None, "not started"
        assert self.record is not None, "not started"
        await self._role.close()
        self._mounting.clear()
        del self.context.exchange.receiver.listeners[self._own_listeners :]
        await self._steps_ended(self.context)
        pool = pool_for(self.settings.config, self.settings.pool, name)
        self.settings = replace(self.settings, pool=pool)
        self.context = replace(self.context, settings=self.settings, intake=Intake())
        self._role = self._roles[name](self.context)
        self._role.mount(self._mounting)  # type: ignore[arg-type]
        self._gauges = WorkerGauges(self.context.metrics, self.settings.slot, name)
        self.context.control.turn(self._role, self._gauges)
        if self._cores is not None:
            self._cores.take_turn(yields=name == "prefill")
        self.record = replace(self.record, state="ready", role=name, pool=pool.name)
        await self._renew(self.context)
        log.info("%s is a %s worker now", self.record.incarnation, name)

    async def _steps_ended(self, context: WorkerContext) -> None:
        """What was ended by the deadline may be in a step that runs."""
        end = time.monotonic() + STOP_DEADLINE_S
        while not context.control.scheduler.is_idle() and time.monotonic() < end:  # noqa: ASYNC110
            await asyncio.sleep(_DRAIN_POLL_S)

    async def _renew(self, context: WorkerContext) -> None:
        """Say in the registry what this worker is and does."""
        assert self.record is not None, "not started"
        asked_at = time.monotonic()
        record = replace(self.record, load=context.control.load())
        renew = self._lease.registered and self._leave_by is None
        try:
            is_there = await self._registry.put(
                record, self.settings.config.registry_ttl_s, renew=renew
            )
        except redis.RedisError as error:
            log.warning("the registry cannot be reached: %s", error)
            return
        if is_there:
            self._lease.renewed(asked_at)
            return
        log.warning("%s is dead to the registry: it takes nothing new", record.incarnation)
        context.intake.close()
        self.record = replace(self.record, state=DRAINING)
        self._leave_by = asked_at + LEAVE_S

    async def _heartbeat(self) -> None:
        config = self.settings.config
        while True:
            began = time.monotonic()
            if not self._changing.locked():
                # One that is being drained, or changes its role, ends that first.
                async with self._changing:
                    await self._live_on(began)
            assert self.context is not None, "not started"
            exchange = self.context.exchange
            exchange.heartbeat()
            await self._role.heartbeat()
            control = self.context.control
            # Blocks are given back without a step, too.
            self._gauges.refresh(control.scheduler, control.pool)
            self._gauges.transfers(exchange.pairs(), exchange.in_flight_bytes, exchange.staging())
            await self._renew(self.context)
            self._check_integrity(self.context)
            self.beats += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, began + config.heartbeat_s - time.monotonic())):
                    await self._awake.wait()

    async def _live_on(self, now: float) -> None:
        """In another life, where this one's lease has lapsed."""
        assert self.context is not None, "not started"
        self._awake.clear()
        if self.drained:
            return
        if self._lease.lapsed:
            await self._take_new_life("it stood still, and its lease lapsed")
        elif self._leave_by is not None and (now >= self._leave_by or self._is_empty(self.context)):
            await self._take_new_life("its lease lapsed while Redis was away for it alone")

    async def _watch_itself(self) -> None:
        """Notice that the process stood still, as soon as it goes on."""
        while True:
            await asyncio.sleep(self.settings.config.heartbeat_s / _BEATS)
            if self._lease.beat(time.monotonic()) and not self._changing.locked():
                self._awake.set()

    def _check_integrity(self, context: WorkerContext) -> None:
        """When nothing runs, nothing is used."""
        is_idle = context.control.scheduler.is_idle() and context.exchange.is_idle()
        if is_idle and (context.tiers is None or context.tiers.is_idle):
            pool = context.engine.pool
            pool.check()
            counts = pool.counts()
            assert counts.used == counts.quarantined == 0, f"blocks leaked: {counts}"

    async def _publish(self) -> None:
        verify_every = max(1, int(self.settings.config.heartbeat_s / PUBLISH_EVERY_S))
        count = 0
        while True:
            count += 1
            took = 0.0
            try:
                began = time.monotonic()
                await self._publisher.publish(verify=count % verify_every == 0)
                took = time.monotonic() - began
            except redis.RedisError as error:
                log.warning("the prefix index cannot be reached: %s", error)
                await asyncio.sleep(self.settings.config.heartbeat_s)
            # Where many workers keep the server busy, each asks for less of it.
            rest = min(_PUBLISH_REST * took, self.settings.config.heartbeat_s)
            await asyncio.sleep(max(PUBLISH_EVERY_S, rest))


def pool_for(config: Config, own: PoolConfig, role: str) -> PoolConfig:
    """What a worker of the pool ``own`` is once it plays ``role``: of the first pool that does,

    with the memory and the threads that it has.
    """
    same = (pool.name for pool in config.pools if pool.role == role)
    return own.model_copy(update={"name": next(same, role), "role": role})


def _is_free(context: WorkerContext) -> bool:
    """Whether nothing of a life that has ended is under way."""
    counts = context.engine.pool.counts()
    moves = context.tiers is not None and not context.tiers.is_idle
    idle = context.control.scheduler.is_idle() and not moves
    return idle and counts.used == counts.quarantined == 0


def keep_buffers() -> None:
    """Have the C library keep freed memory of some size, where it can be told to (mallopt(3)).

    A message of a megabyte would else be given back to the system as soon as it is sent, and the
    next one's pages be cleared by the kernel again: a third of what gRPC takes for it.
    """
    with contextlib.suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_M_MMAP_THRESHOLD, 32 * MIB)
        mallopt(_M_TRIM_THRESHOLD, 256 * MIB)


def spare_the_interpreter() -> None:
    """All that was loaded stays: looking through it for garbage would only stop the steps."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    gc.collect()
    gc.freeze()
