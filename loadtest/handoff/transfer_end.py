"""Makes one end of a measured transfer: blocks and a worker's parts for handoffs, without an
engine.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from baton.config.choices import MIB, TransportName
from baton.config.cluster import Config
from baton.config.tls import TlsConfig
from baton.errors import ConfigError
from baton.host.background import end_tasks
from baton.host.process_tuning import keep_buffers, spare_the_interpreter
from baton.request import Geometry
from baton.rpc.worker_plane import WorkerPlane
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.scheduling.block_pool import BlockPool
from kvtransfer.memory.memory import BlockMemory, HostMemory
from kvtransfer.memory.shared_pool import allocate
from kvtransfer.pairs.pair import Identity, PairLimits
from loadtest.common.child_processes import LOOPBACK
from worker.exchange.block_receiver import BlockReceiver
from worker.exchange.exchange import Exchange
from worker.exchange.rank_link import RankLinks
from worker.exchange.transports import make_transports

_FINGERPRINT = "bench"
_SLOTS, _SIDES, _VALUE_BYTES = 16, 2, 2


@dataclass(frozen=True, slots=True)
class BenchPool:
    """A pool of blocks in shared memory, which other processes of the host may map."""

    data: npt.NDArray[np.uint8]
    """The pool's blocks, uint8 [blocks, block_bytes], contiguous."""
    memory: HostMemory


@contextlib.contextmanager
def bench_pool(blocks: int, block_bytes: int) -> Iterator[BenchPool]:
    """Allocate a pool of ``blocks`` blocks. Raises ConfigError if there is too little memory."""
    shared = allocate(blocks * block_bytes)
    try:
        data = shared.data.reshape(blocks, block_bytes)
        # All blocks differ, so that a block in the wrong place is detected.
        data.view(np.uint64)[:] = np.arange(blocks, dtype=np.uint64)[:, None]
        yield BenchPool(data, HostMemory(data, shared.file))
    finally:
        shared.close()


def identity_of(name: str, block_bytes: int) -> Identity:
    """Return the identity of a transfer's end whose blocks have ``block_bytes`` bytes.

    Raises ConfigError if the size is not possible.
    """
    dim, rest = divmod(block_bytes, _SLOTS * _SIDES * _VALUE_BYTES)
    if rest or not dim:
        raise ConfigError(f"a block of {block_bytes} bytes: a multiple of 64 is needed")
    return Identity(name, _FINGERPRINT, Geometry(_SLOTS, 1, 1, dim, "bfloat16"))


TRANSFER_THREADS = 2
"""Number of threads for transfers, the same as in a worker."""


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
    """Make one end of a transfer, which uses only ``transport``. Its limits are the defaults.

    ``address`` is the host:port of the end's gRPC server. It is empty for an end that only sends.
    ``certs`` is a folder of `baton certs init`, for mutual TLS. ``rank_addresses`` are the
    addresses of the end's other ranks, if any. Raises ConfigError if the transport does not work
    here, and WorkerFailed if a rank does not answer.
    """
    tls = TlsConfig(folder=certs)
    config = Config.model_construct(transport=transport, tls=tls)
    usual = sys.getswitchinterval()
    spare_the_interpreter()
    keep_buffers()
    threads = ThreadPoolExecutor(TRANSFER_THREADS, thread_name_prefix="transfer")
    advanced = config.advanced
    limits = PairLimits(window_bytes=advanced.transfer_window_mib * MIB, silence_s=advanced.lease_s)
    plane = WorkerPlane.of(tls.of("worker"), config.cluster_secret)
    ranks = RankLinks(rank_addresses, limits, advanced.lease_s, plane) if rank_addresses else None
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
        exchange = Exchange(
            identity,
            transports,
            receiver,
            limits,
            threads,
            address=address,
            ranks=ranks,
            plane=plane,
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
