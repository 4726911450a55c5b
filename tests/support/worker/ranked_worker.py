"""Workers of several ranks without engines: real streams, transports, pools and tickets.

The blocks of all workers are those of one model whose KV is random: ``model_kv`` says what a token
of it is, and ``rank_blocks`` how a rank's blocks look that hold it.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict
from pathlib import Path

import numpy as np
import numpy.typing as npt
from prometheus_client import CollectorRegistry

from baton.request import Geometry
from baton.rpc.grpc_channel import make_server
from baton.telemetry.worker_metrics import WorkerMetrics
from baton.v1 import transfer_pb2_grpc
from engine.scheduling.block_pool import BlockPool
from kvtransfer.layout.layout import SCALE_BYTES, KvLayout
from kvtransfer.memory.memory import HostMemory
from kvtransfer.memory.shared_pool import SharedPool, allocate
from kvtransfer.pairs.pair import Identity, PairLimits
from kvtransfer.pairs.push_fan import BlockPush
from kvtransfer.tickets import Ticket
from kvtransfer.transports.grpc_transport import GrpcTransport
from kvtransfer.transports.shm_transport import ShmTransport
from kvtransfer.transports.transport import Peer, Transport
from worker.exchange.block_receiver import BlockReceiver
from worker.exchange.exchange import Exchange
from worker.exchange.rank_link import RankLinks
from worker.exchange.rank_server import RankServer
from worker.services import TransferServicer

DEADLINE_S = 20.0
LIMITS = PairLimits(window_bytes=4 << 20, silence_s=3.0)
BLOCKS = 128
ROOT = Path(__file__).resolve().parents[3]
Bytes = npt.NDArray[np.uint8]


def geometry_of(heads: int, ranks: int, kv_dtype: str = "int8") -> Geometry:
    return Geometry(4, 3, heads, 24, kv_dtype, ranks)


def model_kv(geometry: Geometry, seed: int) -> Bytes:
    """Codes and scales of every row: uint8 [block, layer, K/V, head, slot, byte]."""
    layout = KvLayout.of(geometry)
    width = layout.row_bytes + SCALE_BYTES * layout.has_scales
    shape = (BLOCKS, layout.layers, 2, layout.kv_heads, layout.block_size, width)
    return np.random.default_rng(seed).integers(0, 256, shape, np.uint8)


def rank_blocks(geometry: Geometry, rank: int, kv: Bytes) -> Bytes:
    """uint8 [block, used bytes]: the blocks of ``kv`` on one rank."""
    layout = KvLayout.of(geometry)
    heads = layout.heads_of(rank)
    own = kv[:, :, :, heads.start : heads.stop]
    codes = own[..., : layout.row_bytes].reshape(len(kv), -1)
    scales = own[..., layout.row_bytes :].reshape(len(kv), -1)
    return np.concatenate((codes, scales), axis=1)


def make_transports(
    names: Sequence[str], executor: Executor, memory: HostMemory
) -> list[Transport]:
    """Registered ones."""
    makers: dict[str, Callable[[], Transport]] = {
        "shm": lambda: ShmTransport(executor),
        "grpc": GrpcTransport,
    }
    made = [makers[name]() for name in names]
    for transport in made:
        transport.register(memory)
    return made


class RankMemory:
    """The blocks of one rank."""

    def __init__(self, geometry: Geometry, rank: int, kv: Bytes | None) -> None:
        """``kv``: what they hold; None: bytes that no test expects."""
        layout = KvLayout.of(geometry).of_rank(rank)
        self.used = layout.used_bytes
        self.pool: SharedPool = allocate(BLOCKS * layout.block_bytes)
        self.data: Bytes = self.pool.data.reshape(BLOCKS, layout.block_bytes)
        self.data[:] = 0xA5
        if kv is not None:
            self.data[:, : self.used] = rank_blocks(geometry, rank, kv)
        self.memory = HostMemory(self.data, self.pool.file)


class RankedWorker:
    """Rank 0 with its exchange, and the other ranks with their servers, all on this loop."""

    def __init__(
        self,
        name: str,
        geometry: Geometry,
        transports: Sequence[str],
        kv: Bytes | None,
        limits: PairLimits = LIMITS,
    ) -> None:
        self.geometry = geometry
        self.identity = Identity(f"{name}:1", "model", geometry)
        self.limits = limits
        self.transports = transports
        self.executor = ThreadPoolExecutor(2)
        here = range(geometry.tensor_parallel)
        self.ranks = [RankMemory(geometry, rank, kv) for rank in here]
        self.pool = BlockPool(BLOCKS)
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.servers: list[RankServer] = []
        self.links: RankLinks | None = None
        self.receiver: BlockReceiver
        self.exchange: Exchange
        self.peer: Peer

    async def start(self, stack: AsyncExitStack, addresses: Sequence[str] | None = None) -> None:
        """Serve; ``addresses`` of the other ranks, where they are processes of their own."""
        stack.callback(self.executor.shutdown)
        for rank in self.ranks:
            stack.callback(rank.pool.close)
        if addresses is None:
            addresses = [await self._serve(stack, rank) for rank in self.ranks[1:]]
        if addresses:
            self.links = RankLinks(addresses, self.limits, self.limits.silence_s)
            await self.links.open(self.identity)
        memory = self.ranks[0].memory
        self.receiver = BlockReceiver(
            self.pool,
            self.metrics,
            block_bytes=memory.block_bytes,
            lease_s=self.limits.silence_s,
            geometry=self.geometry,
            ranks=self.links,
        )
        made = make_transports(self.transports, self.executor, memory)
        server = make_server()
        port = server.add_insecure_port("127.0.0.1:0")
        self.peer = Peer(self.identity.incarnation, f"127.0.0.1:{port}")
        self.exchange = Exchange(
            self.identity,
            made,
            self.receiver,
            self.limits,
            self.executor,
            address=self.peer.address,
            ranks=self.links,
        )
        servicer = TransferServicer(self.exchange)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(servicer, server)
        await server.start()
        stack.push_async_callback(server.stop, None)
        stack.push_async_callback(self.exchange.close)
        beating = asyncio.create_task(self._beat())
        stack.callback(beating.cancel)

    async def _serve(self, stack: AsyncExitStack, rank: RankMemory) -> str:
        server = RankServer(
            lambda _: make_transports(self.transports, self.executor, rank.memory), self.executor
        )
        await server.start()
        stack.push_async_callback(server.close)
        self.servers.append(server)
        return server.address

    async def _beat(self) -> None:
        while True:
            self.exchange.heartbeat()
            await asyncio.sleep(self.limits.silence_s / 6)

    def promise(self, writer: RankedWorker, missing: int, attempt: int = 0) -> Ticket:
        """A ticket for another worker."""
        return self.receiver.promise(
            ("r", attempt),
            writer.identity.incarnation,
            missing=missing,
            pinned=[],
            now=time.monotonic(),
            geometry=writer.geometry,
        )

    async def begin(
        self, receiver: RankedWorker, blocks: int, attempt: int = 0
    ) -> tuple[Ticket, BlockPush]:
        """A ticket there, and the push to it before anything is put."""
        ticket = receiver.promise(self, blocks, attempt)
        opened = receiver.receiver.opened(ticket.ticket_id)
        async with asyncio.timeout(DEADLINE_S):
            if opened is not None:
                await opened
            pair = await self.exchange.outbound(receiver.peer)
        return ticket, self.exchange.push(pair, ticket.ticket_id)

    async def hand_over(
        self, receiver: RankedWorker, sources: Sequence[int], attempt: int = 0
    ) -> tuple[Ticket, int]:
        """Push blocks to a new ticket there, and commit it. Returns the bytes that went, too."""
        ticket, push = await self.begin(receiver, len(sources), attempt)
        for target, source in enumerate(sources):
            push.put_layers(target, source, 0, self.geometry.layers)
        push.end()
        async with asyncio.timeout(DEADLINE_S):
            count = await push.done
        await until(lambda: ticket.is_complete)
        receiver.receiver.commit(ticket.ticket_id, self.identity.incarnation, time.monotonic())
        return ticket, count

    def check_blocks(self, blocks: Sequence[int], sources: Sequence[int], kv: Bytes) -> None:
        """On every rank here ``blocks`` hold what ``kv`` has in ``sources``."""
        for rank, memory in enumerate(self.ranks):
            expected = rank_blocks(self.geometry, rank, kv[list(sources)])
            assert (memory.data[list(blocks), : memory.used] == expected).all(), f"rank {rank}"

    def check_all_is_free(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.used == counts.quarantined == 0


@asynccontextmanager
async def workers(
    writer: RankedWorker, receiver: RankedWorker
) -> AsyncIterator[tuple[RankedWorker, RankedWorker]]:
    """Both, serving."""
    async with AsyncExitStack() as stack:
        await receiver.start(stack)
        await writer.start(stack)
        yield writer, receiver


class RankProcess:
    """A rank in a process of its own: ``rank_script``."""

    def __init__(
        self, geometry: Geometry, rank: int, transports: Sequence[str], seed: int | None
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.worker.rank_script"],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self._tell([asdict(geometry), rank, list(transports), seed])
        self.address = str(self._said())

    def blocks(self, blocks: Sequence[int]) -> Bytes:
        """uint8 [block, used bytes], as they are there."""
        self._tell(list(blocks))
        data = np.frombuffer(bytes.fromhex(str(self._said())), dtype=np.uint8)
        return data.reshape(len(blocks), -1)

    def _tell(self, what: object) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(what) + "\n")
        self._process.stdin.flush()

    def _said(self) -> object:
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def signal(self, number: int) -> None:
        """Have it stop, or die."""
        self._process.send_signal(number)

    def close(self) -> None:
        """End it, whatever its state; idempotent."""
        self._process.kill()
        self._process.communicate(timeout=DEADLINE_S)


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)
