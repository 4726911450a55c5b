"""One life of a worker: what has an incarnation.

    serving ─turn()→ serving, in the other role ─end()→ over

A server on a port of its own, a role, pairs with others and tickets, an entry in the registry and
in the index. What has an engine outlives it: weights, cached blocks and the tiers behind them,
metrics.

Owned by the event loop.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace

import grpc.aio
import redis.asyncio

from baton.config.choices import MIB
from baton.liveness.listening import ListeningClock
from baton.rpc.grpc_channel import listen, make_server
from baton.security.peer_roles import PeerRoles
from baton.store.prefix_index import PrefixIndex
from baton.store.registry import WorkerRecord
from baton.telemetry.worker_metrics import WorkerMetrics
from baton.v1 import cache_pb2_grpc, control_pb2_grpc, transfer_pb2_grpc
from engine.engine import Engine
from engine.parallel.step_channel import SILENT_RANK_S
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.pairs.pair import Identity, PairLimits
from worker.core.engine_core import EngineCore
from worker.costs.step_costs import StepCosts
from worker.exchange.block_receiver import BlockReceiver
from worker.exchange.exchange import Exchange
from worker.exchange.rank_link import RankLinks
from worker.exchange.transports import make_transports
from worker.offload.kv_tiers import KvTiers
from worker.registry.index_publisher import IndexPublisher
from worker.role import Intake, Role, RoleFactory, WorkerContext
from worker.services import (
    CacheServicer,
    ControlServicer,
    Drainable,
    DynamicServices,
    TransferServicer,
)
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Lasting:
    """What outlives a life."""

    core: EngineCore
    memory: BlockMemory
    metrics: WorkerMetrics
    metrics_port: int
    tiers: KvTiers | None
    costs: StepCosts
    transfers: ThreadPoolExecutor
    clock: ListeningClock
    """The clock of leases; the process ticks it."""
    ranks: tuple[str, ...] = ()
    """Addresses of the worker's other ranks, from 1 on, where these exchange blocks: of ranks that
    divide prompts rank 0 has all of a block."""


class Life:
    """See the module's text; ``begin`` makes one."""

    def __init__(
        self, context: WorkerContext, roles: Mapping[str, RoleFactory], server: grpc.aio.Server
    ) -> None:
        """``server`` has a port and no services yet."""
        self.context = context
        self.server = server
        self._roles = roles
        self._mounting = DynamicServices()
        self.role = self._mount()
        self.record: WorkerRecord
        self.publisher: IndexPublisher

    @classmethod
    async def begin(
        cls,
        settings: WorkerSettings,
        lasting: Lasting,
        roles: Mapping[str, RoleFactory],
        process: Drainable,
        client: redis.asyncio.Redis,
    ) -> Life:
        """Serve under a new incarnation, which is not registered yet.

        Raises BatonError where another rank cannot be reached.
        """
        incarnation = f"{settings.slot}:{secrets.token_hex(6)}"
        core, tiers = lasting.core, lasting.tiers
        tls = settings.config.tls.of("worker")
        server = make_server(gates=() if tls is None else (PeerRoles(),))
        address = f"{settings.host}:{listen(server, f'{settings.host}:0', tls)}"
        exchange = await _exchange(settings, lasting, incarnation, address)
        context = WorkerContext(
            settings=settings,
            engine=core.engine,
            core=core,
            memory=lasting.memory,
            exchange=exchange,
            metrics=lasting.metrics,
            incarnation=incarnation,
            tiers=tiers,
        )
        life = cls(context, roles, server)
        life._add_services(process)
        core.begin(incarnation)
        await server.start()
        life.record = _record(settings, lasting, incarnation, address)
        index = PrefixIndex(
            client, settings.cluster_id, memory_bytes=settings.config.advanced.index_mib * MIB
        )
        books = None if tiers is None else tiers.tiers
        life.publisher = IndexPublisher(index, books or core.engine.pool, incarnation)
        log.info("%s serves on %s", incarnation, life.record.address)
        return life

    def _add_services(self, process: Drainable) -> None:
        context, server = self.context, self.server
        server.add_generic_rpc_handlers((self._mounting,))
        control_pb2_grpc.add_ControlServiceServicer_to_server(ControlServicer(process), server)
        transfers = TransferServicer(context.exchange)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(transfers, server)
        books = None if context.tiers is None else context.tiers.tiers
        caches = CacheServicer(context.engine.pool, books)
        cache_pb2_grpc.add_CacheServiceServicer_to_server(caches, server)

    def _mount(self) -> Role:
        role = self._roles[self.context.settings.pool.role](self.context)
        role.mount(self._mounting)  # type: ignore[arg-type]
        self._unsubscribe = self.context.core.subscribe(role)
        return role

    async def close_role(self) -> None:
        """What runs ends with an error, or has ended; another role may follow."""
        await self.role.close()
        self._mounting.clear()

    def turn(self, settings: WorkerSettings) -> None:
        """Take the role that ``settings`` name, once the one before is closed and idle."""
        self._unsubscribe()
        self.context = replace(self.context, settings=settings, intake=Intake())
        self.role = self._mount()
        pool = settings.pool
        self.record = replace(self.record, state="ready", role=pool.role, pool=pool.name)

    async def end(self) -> None:
        """End whatever runs, with an error."""
        await self.role.close()
        self._unsubscribe()
        await self.context.exchange.close()
        await self.server.stop(grace=1.0)

    @property
    def is_empty(self) -> bool:
        """Whether nothing is left of what was taken."""
        context = self.context
        idle = context.core.scheduler.is_idle() and context.exchange.is_idle()
        return idle and not context.intake.under_way

    @property
    def is_over(self) -> bool:
        """Whether nothing of a life that has ended is under way in the engine."""
        context = self.context
        counts = context.engine.pool.counts()
        moves = context.tiers is not None and not context.tiers.is_idle
        idle = context.core.scheduler.is_idle() and not moves
        return idle and counts.used == counts.quarantined == 0


async def _exchange(
    settings: WorkerSettings, lasting: Lasting, incarnation: str, address: str
) -> Exchange:
    config, memory = settings.config, lasting.memory
    engine: Engine = lasting.core.engine
    limits = PairLimits(
        window_bytes=config.advanced.transfer_window_mib * MIB, silence_s=config.advanced.lease_s
    )
    identity = Identity(incarnation, engine.fingerprint, engine.cache.geometry())
    tls = config.tls.of("worker")
    ranks = RankLinks(lasting.ranks, limits, SILENT_RANK_S, tls) if lasting.ranks else None
    if ranks is not None:
        await ranks.open(identity)
    receiver = BlockReceiver(
        engine.pool,
        lasting.metrics,
        block_bytes=memory.block_bytes,
        lease_s=config.advanced.lease_s,
        worker=settings.slot,
        geometry=engine.cache.geometry(),
        ranks=ranks,
        clock=lasting.clock,
    )
    transports = make_transports(config, memory, incarnation, settings.host, lasting.transfers)
    return Exchange(
        identity,
        transports,
        receiver,
        limits,
        lasting.transfers,
        address=address,
        ranks=ranks,
        tls=tls,
        recall=None if lasting.tiers is None else lasting.tiers.loader.recall,
    )


def _record(
    settings: WorkerSettings, lasting: Lasting, incarnation: str, address: str
) -> WorkerRecord:
    engine, pool = lasting.core.engine, settings.pool
    return WorkerRecord(
        incarnation=incarnation,
        slot=settings.slot,
        role=pool.role,
        address=address,
        metrics_address=f"{settings.host}:{lasting.metrics_port}",
        model=settings.model_name,
        fingerprint=engine.fingerprint,
        geometry=engine.cache.geometry(),
        context_length=engine.context_length,
        total_blocks=engine.pool.total,
        max_sequences=pool.max_sequences,
        pool=pool.name,
        revision=settings.config.revision,
        ranks=pool.ranks,
        prefill_cost=lasting.costs.prefill,
        step_cost=lasting.costs.step,
    )
