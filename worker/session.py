"""A session of a worker: everything that belongs to one incarnation.

    serving ─change_role()→ serving, in the other role ─end()→ over

A session has a server on its own port, a role, pairs with other workers, tickets, and entries in
the registry and the prefix index. The runtime outlives it: engine, cached blocks and KV tiers,
metrics.

Owned by the event loop.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import grpc.aio
import redis.asyncio
import torch

from baton.config.choices import MIB
from baton.config.cluster import Config
from baton.hashing import text_hash
from baton.rpc.grpc_channel import listen
from baton.rpc.worker_plane import WorkerPlane
from baton.store.prefix_index import PrefixIndex
from baton.store.registry import DRAINING, WorkerRecord
from baton.v1 import cache_pb2_grpc, control_pb2_grpc, transfer_pb2_grpc
from engine.engine import Engine
from engine.parallel.step_channel import SILENT_RANK_S
from kvtransfer.pairs.pair import Identity, PairLimits
from kvtransfer.transports.cuda_ipc import device_uuid
from worker.device.device_memory import device_memory
from worker.exchange.block_receiver import BlockReceiver
from worker.exchange.exchange import Exchange
from worker.exchange.rank_link import RankLinks
from worker.exchange.transports import make_transports
from worker.registry.index_publisher import IndexPublisher
from worker.role import Intake, Role, RoleFactory, WorkerContext
from worker.runtime import WorkerRuntime
from worker.services import (
    CacheServicer,
    ControlServicer,
    Drainable,
    RoleServices,
    TransferServicer,
)
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)


_CHECK_REST = 100
"""Pause between two checks of all blocks, as a multiple of the last check's duration.

A check blocks the event loop: for half a million blocks of a tiny model, it takes a tenth of a
second or more.
"""


class WorkerSession:
    """One session of a worker, under one incarnation; ``begin`` makes one."""

    def __init__(
        self,
        context: WorkerContext,
        runtime: WorkerRuntime,
        roles: Mapping[str, RoleFactory],
        server: grpc.aio.Server,
        role_services: RoleServices,
        record: WorkerRecord,
        publisher: IndexPublisher,
    ) -> None:
        """``server`` has a port and has not started. It looks up the role's methods in
        ``role_services``.

        ``record`` is the worker's registry record.
        """
        self.context = context
        self.runtime = runtime
        self.server = server
        self.record = record
        self.publisher = publisher
        self._roles = roles
        self._role_services = role_services
        self.role, self._unsubscribe = self._mount()
        self._next_check_at = 0.0
        self._device_shown_at = time.monotonic()

    @classmethod
    async def begin(
        cls,
        settings: WorkerSettings,
        runtime: WorkerRuntime,
        roles: Mapping[str, RoleFactory],
        process: Drainable,
        client: redis.asyncio.Redis,
    ) -> WorkerSession:
        """Begin to serve under a new incarnation, which is not registered yet. Returns the session.

        Raises BatonError if another rank cannot be reached.
        """
        incarnation = f"{settings.slot}:{secrets.token_hex(6)}"
        core, tiers = runtime.core, runtime.tiers
        plane = _plane(settings.config)
        role_services = RoleServices()
        server = plane.server(role_services)
        role_services.register(server)
        address = f"{settings.host}:{listen(server, f'{settings.host}:0', plane.tls)}"
        context = WorkerContext(
            settings=settings,
            engine=core.engine,
            core=core,
            memory=runtime.memory,
            exchange=await _exchange(settings, runtime, incarnation, address),
            metrics=runtime.metrics,
            incarnation=incarnation,
            tiers=tiers,
        )
        _add_services(server, context, process)
        index = PrefixIndex(
            client, settings.cluster_id, memory_bytes=settings.config.advanced.index_mib * MIB
        )
        blocks = core.engine.pool if tiers is None else tiers.tiers
        session = cls(
            context,
            runtime,
            roles,
            server,
            role_services,
            _record(settings, runtime, incarnation, address),
            IndexPublisher(index, blocks, incarnation),
        )
        core.begin(incarnation)
        await server.start()
        log.info("%s serves on %s", incarnation, address)
        return session

    def _mount(self) -> tuple[Role, Callable[[], None]]:
        """Make the current role's object, and subscribe it to the results of steps.

        Returns the role, and a function that ends its subscription.
        """
        role = self._roles[self.context.settings.pool.role](self.context)
        role.mount(self._role_services)  # type: ignore[arg-type]
        return role, self.context.core.subscribe(role)

    def current_record(self) -> WorkerRecord:
        """Return the session's registry record, with the current load."""
        return replace(self.record, load=self.context.core.load())

    def refuse_work(self) -> None:
        """Accept no new work, and mark the record as draining; idempotent."""
        self.context.intake.close()
        self.record = replace(self.record, state=DRAINING)

    async def close_role(self) -> None:
        """End the role's requests that still run, with an error. Another role may follow."""
        await self.role.close()
        self._role_services.clear()

    def change_role(self, settings: WorkerSettings) -> None:
        """Change to the role that ``settings`` name. Call this when the previous role is closed and
        has no work left."""
        self._unsubscribe()
        self.context = replace(self.context, settings=settings, intake=Intake())
        self.role, self._unsubscribe = self._mount()
        pool = settings.pool
        self.record = replace(self.record, state="ready", role=pool.role, pool=pool.name)
        self.runtime.gauges.change_role(pool.role)
        if self.runtime.board is not None:
            self.runtime.board.take_turn(yields=pool.role == "prefill")

    async def end(self) -> None:
        """End everything that runs in the session, with an error."""
        # A request that still comes must not meet connections that are closed.
        self.context.intake.close()
        await self.role.close()
        self._unsubscribe()
        await self.context.exchange.close()
        await self.server.stop(grace=1.0)

    async def heartbeat(self) -> None:
        """Renew leases, end requests and tickets that have expired, and update the metrics.

        Raises WorkerFailed if a rank is lost or the engine hangs, and AssertionError if blocks have
        leaked.
        """
        context, gauges = self.context, self.runtime.gauges
        exchange, core = context.exchange, context.core
        exchange.heartbeat()
        exchange.check_ranks()
        await self.role.heartbeat()
        # Blocks also return without a step.
        gauges.refresh(core.scheduler, core.pool)
        gauges.transfers(exchange.pairs(), exchange.in_flight_bytes, exchange.staging())
        gauges.show_utilization()
        self._show_device()
        self._check_blocks(time.monotonic())

    def _show_device(self) -> None:
        now = time.monotonic()
        passed, self._device_shown_at = now - self._device_shown_at, now
        runtime = self.runtime
        memory = device_memory(runtime.core.engine.runner.device)
        ranks = self.context.settings.pool.ranks
        runtime.gauges.show_device(memory.used, memory.total, passed * ranks)

    def _check_blocks(self, now: float) -> None:
        """Check from time to time that no block is in use while no request runs. Raises
        AssertionError otherwise."""
        if now < self._next_check_at:
            return
        context = self.context
        is_idle = context.core.scheduler.is_idle() and context.exchange.is_idle()
        if is_idle and (context.tiers is None or context.tiers.is_idle):
            pool = context.engine.pool
            pool.check()
            counts = pool.counts()
            assert counts.used == counts.quarantined == 0, f"blocks leaked: {counts}"
            self._next_check_at = now + _CHECK_REST * (time.monotonic() - now)

    @property
    def is_empty(self) -> bool:
        """Whether all work that the session has accepted has ended."""
        context = self.context
        idle = context.core.scheduler.is_idle() and context.exchange.is_idle()
        return idle and not context.intake.under_way

    @property
    def is_over(self) -> bool:
        """Whether the session has ended, and the engine has none of its steps and blocks left."""
        context = self.context
        counts = context.engine.pool.counts()
        moves = context.tiers is not None and not context.tiers.is_idle
        idle = context.core.scheduler.is_idle() and not moves
        return idle and counts.used == counts.quarantined == 0


def _plane(config: Config) -> WorkerPlane:
    return WorkerPlane.of(config.tls.of("worker"), config.cluster_secret)


def _add_services(server: grpc.aio.Server, context: WorkerContext, process: Drainable) -> None:
    """Add the gRPC services that every role has to the server."""
    control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(process), server)
    transfers = TransferServicer(context.exchange)
    transfer_pb2_grpc.add_TransferServiceServicer_to_server(transfers, server)
    books = None if context.tiers is None else context.tiers.tiers
    caches = CacheServicer(context.engine.pool, context.core.retention, books)
    cache_pb2_grpc.add_CacheServiceServicer_to_server(caches, server)


async def _exchange(
    settings: WorkerSettings, runtime: WorkerRuntime, incarnation: str, address: str
) -> Exchange:
    config, memory = settings.config, runtime.memory
    engine: Engine = runtime.core.engine
    limits = PairLimits(
        window_bytes=config.advanced.transfer_window_mib * MIB, silence_s=config.advanced.lease_s
    )
    identity = Identity(incarnation, engine.fingerprint, engine.cache.geometry)
    plane = _plane(config)
    ranks = RankLinks(runtime.ranks, limits, SILENT_RANK_S, plane) if runtime.ranks else None
    if ranks is not None:
        await ranks.open(identity)
    receiver = BlockReceiver(
        engine.pool,
        runtime.metrics,
        block_bytes=memory.block_bytes,
        lease_s=config.advanced.lease_s,
        worker=settings.slot,
        geometry=engine.cache.geometry,
        ranks=ranks,
        clock=runtime.clock,
    )
    transports = make_transports(config, memory, incarnation, settings.host, runtime.transfers)
    return Exchange(
        identity,
        transports,
        receiver,
        limits,
        runtime.transfers,
        address=address,
        ranks=ranks,
        plane=plane,
        recall=None if runtime.tiers is None else runtime.tiers.loader.recall,
    )


def _record(
    settings: WorkerSettings, runtime: WorkerRuntime, incarnation: str, address: str
) -> WorkerRecord:
    engine, pool = runtime.core.engine, settings.pool
    return WorkerRecord(
        incarnation=incarnation,
        slot=settings.slot,
        role=pool.role,
        address=address,
        metrics_address=f"{settings.host}:{runtime.metrics_server.port}",
        model=settings.model_name,
        fingerprint=engine.fingerprint,
        geometry=engine.cache.geometry,
        context_length=engine.context_length,
        total_blocks=engine.pool.total,
        max_sequences=pool.max_sequences,
        pool=pool.name,
        revision=settings.config.revision,
        ranks=pool.ranks,
        prefill_cost=runtime.costs.prefill,
        step_cost=runtime.costs.step,
        block_bytes=_block_bytes(engine),
        quantization=engine.quantization,
        dtype=settings.config.dtype,
        device=_device_name(engine.runner.device),
        drafter="" if engine.runner.drafter == "none" else engine.runner.drafter,
        config_hash=settings.config_hash,
        tokenizer=text_hash(Path(settings.model_path)),
        kv_exchange=_kv_exchange(settings.config),
        shares_cores=runtime.board is not None,
        gpu=_gpu(engine.runner.device),
    )


def _kv_exchange(config: Config) -> str:
    own = config.transport, config.block_size
    usual = tuple(Config.model_fields[name].default for name in ("transport", "block_size"))
    return "" if own == usual else f"{config.transport}/{config.block_size}"


def _block_bytes(engine: Engine) -> int:
    """Return the bytes of a KV block on all ranks of the worker together."""
    if engine.storage is None:
        return engine.cache.block_bytes
    return round(engine.storage.kv_token_bytes * engine.cache.block_size)


def _gpu(device: torch.device) -> str:
    return device_uuid(device.index or 0) if device.type == "cuda" else ""


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
