"""One end of a pair that is measured: what a worker has for handoffs, without an engine."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry

from baton.config.choices import MIB, TransportName
from baton.config.cluster import Config
from baton.config.tls import TlsConfig
from baton.host.background import end_tasks
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.scheduling.block_pool import BlockPool
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.pairs.pair import Identity, PairLimits
from worker.device.process_tuning import keep_buffers, spare_the_interpreter
from worker.exchange.block_receiver import BlockReceiver
from worker.exchange.exchange import Exchange
from worker.exchange.rank_link import RankLinks
from worker.exchange.transports import make_transports

LOOPBACK = "127.0.0.1"
TRANSFER_THREADS = 2
"""As a worker has."""


@contextlib.asynccontextmanager
async def transfer_end(
    identity: Identity,
    memory: BlockMemory,
    transport: TransportName,
    rank_addresses: Sequence[str] = (),
    *,
    address: str = "",
    certs: str = "",
) -> AsyncIterator[Exchange]:
    """An end that can use ``transport`` alone; its limits are the defaults.

    ``address``: host:port of its gRPC server; empty for an end that receives nothing. ``certs``: a
    folder of `baton certs init`, for mutual TLS. ``rank_addresses`` are those of its other ranks,
    where it has any. Raises ConfigError where the transport does not work here, WorkerFailed where
    a rank does not answer.
    """
    tls = TlsConfig(folder=certs)
    config = Config.model_construct(transport=transport, tls=tls)
    usual = sys.getswitchinterval()
    spare_the_interpreter()
    keep_buffers()
    threads = ThreadPoolExecutor(TRANSFER_THREADS, thread_name_prefix="transfer")
    advanced = config.advanced
    limits = PairLimits(window_bytes=advanced.transfer_window_mib * MIB, silence_s=advanced.lease_s)
    ranks = RankLinks(rank_addresses, limits, advanced.lease_s) if rank_addresses else None
    try:
        if ranks is not None:
            await ranks.open(identity)
        transports = make_transports(config, memory, identity.incarnation, LOOPBACK, threads)
        receiver = BlockReceiver(
            BlockPool(memory.blocks),
            WorkerMetrics(CollectorRegistry()),
            block_bytes=memory.block_bytes,
            lease_s=advanced.lease_s,
            geometry=identity.geometry,
            ranks=ranks,
        )
        own = tls.of("worker")
        exchange = Exchange(
            identity, transports, receiver, limits, threads, address=address, ranks=ranks, tls=own
        )
        beat = asyncio.create_task(_beat(exchange, advanced.heartbeat_s), name="heartbeat")
        try:
            yield exchange
        finally:
            await end_tasks([beat])
            await exchange.close()
    finally:
        threads.shutdown(wait=True, cancel_futures=True)
        sys.setswitchinterval(usual)
        gc.unfreeze()


async def _beat(exchange: Exchange, every_s: float) -> None:
    while True:
        exchange.heartbeat()
        await asyncio.sleep(every_s)
