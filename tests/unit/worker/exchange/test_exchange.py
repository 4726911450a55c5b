"""Whole pairs between workers without engines: real streams, transports, pools and tickets."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import numpy as np
import numpy.typing as npt
import pytest
from prometheus_client import CollectorRegistry

from baton.errors import (
    BatonError,
    FingerprintMismatch,
    GeometryMismatch,
    HandoffError,
    TicketEnded,
    Unavailable,
    WorkerFailed,
)
from baton.request import Geometry
from baton.rpc import convert
from baton.rpc.grpc_channel import make_server
from baton.telemetry.worker_metrics import WorkerMetrics
from baton.v1 import transfer_pb2, transfer_pb2_grpc
from engine.scheduling.block_pool import BlockPool
from kvtransfer.memory.memory import HostMemory
from kvtransfer.memory.shared_pool import allocate
from kvtransfer.pairs.pair import Identity, PairLimits
from kvtransfer.tickets import Ticket
from kvtransfer.transports.grpc_transport import GrpcTransport
from kvtransfer.transports.shm_transport import ShmTransport
from kvtransfer.transports.transport import Peer, Transport
from worker.exchange.block_receiver import BlockReceiver
from worker.exchange.exchange import Exchange
from worker.services import TransferServicer

DEADLINE_S = 20.0
GEOMETRY = Geometry(2, 1, 1, 8192, "float32")
BLOCKS, BLOCK_BYTES = 40, 128 << 10
LIMITS = PairLimits(window_bytes=4 << 20, silence_s=3.0)


class Worker:
    """An exchange that is served, and the blocks behind it."""

    def __init__(
        self, stack: AsyncExitStack, name: str, transports: tuple[str, ...], seed: int
    ) -> None:
        memory = allocate(BLOCKS * BLOCK_BYTES)
        stack.callback(memory.close)
        self.data: npt.NDArray[np.uint8] = memory.data.reshape(BLOCKS, BLOCK_BYTES)
        self.data[:] = np.random.default_rng(seed).integers(0, 256, self.data.shape, np.uint8)
        self.executor = ThreadPoolExecutor(2)
        stack.callback(self.executor.shutdown)
        makers: dict[str, Callable[[], Transport]] = {
            "shm": lambda: ShmTransport(self.executor),
            "grpc": GrpcTransport,
        }
        made = [makers[transport]() for transport in transports]
        for transport in made:
            transport.register(HostMemory(self.data, memory.file))
        self.pool = BlockPool(BLOCKS)
        self.metrics = WorkerMetrics(CollectorRegistry())
        self.receiver = BlockReceiver(
            self.pool, self.metrics, block_bytes=BLOCK_BYTES, lease_s=LIMITS.silence_s
        )
        self.identity = Identity(f"{name}:1", "model", GEOMETRY)
        self.exchange = Exchange(self.identity, made, self.receiver, LIMITS, self.executor)
        self.server = make_server()
        servicer = TransferServicer(self.exchange)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(servicer, self.server)
        port = self.server.add_insecure_port("127.0.0.1:0")
        self.peer = Peer(self.identity.incarnation, f"127.0.0.1:{port}")

    def promise(self, writer: Worker, missing: int, attempt: int = 0) -> Ticket:
        """A ticket for another worker."""
        return self.receiver.promise(
            ("r", attempt),
            writer.identity.incarnation,
            missing=missing,
            pinned=[],
            now=time.monotonic(),
        )

    def bytes_received(self, transport: str) -> float:
        """As /metrics counts them."""
        registry = self.metrics.registry
        labels = {"transport": transport}
        return registry.get_sample_value("baton_handoff_bytes_total", labels) or 0.0

    def check_all_is_free(self) -> None:
        self.pool.check()
        counts = self.pool.counts()
        assert counts.used == counts.quarantined == 0


MakeWorker = Callable[..., Awaitable[Worker]]


@pytest.fixture
async def make_worker() -> AsyncIterator[MakeWorker]:
    """Makes a ``Worker`` that serves."""
    async with AsyncExitStack() as stack:
        count = 0

        async def make(name: str, *transports: str) -> Worker:
            nonlocal count
            count += 1
            worker = Worker(stack, name, transports or ("shm", "grpc"), count)
            await worker.server.start()
            stack.push_async_callback(worker.server.stop, None)
            stack.push_async_callback(worker.exchange.close)
            return worker

        yield make


async def hand_over(
    writer: Worker, receiver: Worker, sources: list[int], attempt: int = 0
) -> Ticket:
    """Push blocks to a new ticket of theirs, and commit it."""
    ticket = receiver.promise(writer, len(sources), attempt)
    pair = await writer.exchange.outbound(receiver.peer)
    push = pair.push(ticket.ticket_id)
    for target, source in enumerate(sources):
        push.put(target, source, 0, BLOCK_BYTES)
    push.end()
    async with asyncio.timeout(DEADLINE_S):
        assert await push.done == len(sources) * BLOCK_BYTES
    return receiver.receiver.commit(ticket.ticket_id, writer.identity.incarnation, time.monotonic())


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.mark.parametrize("transport", ["shm", "grpc"])
async def test_blocks_are_handed_over(make_worker: MakeWorker, transport: str) -> None:
    writer = await make_worker("prefill-0", transport)
    receiver = await make_worker("decode-0", transport)
    expected = receiver.data.copy()
    sources = [30, 2, 17, 5, 6, 7, 8, 39, 0]
    ticket = await hand_over(writer, receiver, sources)
    expected[ticket.missing] = writer.data[sources]
    assert np.array_equal(receiver.data, expected)
    assert receiver.bytes_received(transport) == len(sources) * BLOCK_BYTES
    assert writer.exchange.pairs() == {"decode-0:1": transport}
    assert receiver.exchange.inbound.pairs() == {"prefill-0:1": transport}
    assert receiver.exchange.is_idle()
    receiver.pool.release(ticket.missing)
    receiver.check_all_is_free()


async def test_the_best_that_both_have_is_used(make_worker: MakeWorker) -> None:
    both, one = await make_worker("prefill-0"), await make_worker("decode-0", "grpc")
    other = await make_worker("decode-1")
    await hand_over(both, one, [1])
    await hand_over(both, other, [1])
    assert both.exchange.pairs() == {"decode-0:1": "grpc", "decode-1:1": "shm"}


async def test_nothing_in_common_is_an_error_that_names_both(make_worker: MakeWorker) -> None:
    writer = await make_worker("prefill-0", "shm")
    receiver = await make_worker("decode-0", "grpc")
    with pytest.raises(HandoffError, match="the peer has shm; this worker has grpc"):
        await writer.exchange.outbound(receiver.peer)
    assert writer.exchange.pairs() == {}


async def test_a_pair_is_opened_once_for_all_who_want_it(make_worker: MakeWorker) -> None:
    writer, receiver = await make_worker("prefill-0"), await make_worker("decode-0")
    pairs = await asyncio.gather(*(writer.exchange.outbound(receiver.peer) for _ in range(5)))
    assert len(set(pairs)) == 1
    assert await writer.exchange.outbound(receiver.peer) is pairs[0]
    assert not pairs[0].broken.done()


async def test_a_caller_that_leaves_while_a_pair_is_opened_affects_no_other(
    make_worker: MakeWorker,
) -> None:
    writer, receiver = await make_worker("prefill-0"), await make_worker("decode-0")
    first = asyncio.create_task(writer.exchange.outbound(receiver.peer))
    second = asyncio.create_task(writer.exchange.outbound(receiver.peer))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(DEADLINE_S):
        pair = await second
    assert not pair.broken.done()
    with pytest.raises(asyncio.CancelledError):
        await first


async def test_a_broken_pair_is_opened_again(make_worker: MakeWorker) -> None:
    writer, receiver = await make_worker("prefill-0"), await make_worker("decode-0")
    ticket = await hand_over(writer, receiver, [1, 2])
    pair = await writer.exchange.outbound(receiver.peer)
    receiver.exchange.inbound.close()
    async with asyncio.timeout(DEADLINE_S):
        await asyncio.shield(pair.broken)
    assert writer.exchange.pairs() == {}
    writer.exchange.heartbeat()
    again = await hand_over(writer, receiver, [3, 4], attempt=1)
    assert np.array_equal(receiver.data[again.missing], writer.data[[3, 4]])
    receiver.pool.release(ticket.missing + again.missing)


async def test_a_worker_that_closes_opens_no_more_pairs(make_worker: MakeWorker) -> None:
    """What still asks, such as a peer that fetches blocks, gets no internal error."""
    writer, receiver = await make_worker("prefill-0"), await make_worker("decode-0")
    await writer.exchange._pairs.end_opening()
    with pytest.raises(Unavailable, match="is stopping"):
        await writer.exchange.outbound(receiver.peer)


async def test_a_restarted_receiver_gets_nothing_that_was_meant_for_its_former_life(
    make_worker: MakeWorker,
) -> None:
    writer, receiver = await make_worker("prefill-0"), await make_worker("decode-0")
    former = Peer("decode-0:0", receiver.peer.address)
    with pytest.raises(HandoffError, match="decode-0:0 is gone; this worker is decode-0:1"):
        await writer.exchange.outbound(former)


async def test_a_receiver_that_does_not_answer_is_given_up(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer, receiver = await make_worker("prefill-0"), await make_worker("decode-0")
    monkeypatch.setattr(
        writer.exchange._pairs, "_limits", PairLimits(window_bytes=1, silence_s=0.1)
    )

    async def serve(requests: object, context: object) -> None:
        await asyncio.sleep(DEADLINE_S)

    monkeypatch.setattr(receiver.exchange.inbound, "serve", serve)
    with pytest.raises(WorkerFailed, match=r"decode-0:1 has not answered for 0\.1 s"):
        await writer.exchange.outbound(receiver.peer)


async def test_a_ticket_that_ends_stops_its_push(make_worker: MakeWorker) -> None:
    """The next heartbeat tells its writer."""
    writer, receiver = await make_worker("prefill-0"), await make_worker("decode-0")
    ticket = receiver.promise(writer, 2)
    pair = await writer.exchange.outbound(receiver.peer)
    push = pair.push(ticket.ticket_id)
    receiver.receiver.abort(("r", 0), time.monotonic())
    writer.exchange.heartbeat()
    with pytest.raises(TicketEnded):
        async with asyncio.timeout(DEADLINE_S):
            await push.done
    receiver.check_all_is_free()


async def test_a_writer_whose_pair_closes_leaves_no_block_behind(make_worker: MakeWorker) -> None:
    writer, receiver = await make_worker("prefill-0"), await make_worker("decode-0")
    ticket = receiver.promise(writer, 2)
    pair = await writer.exchange.outbound(receiver.peer)
    push = pair.push(ticket.ticket_id)
    push.put(0, 5, 0, BLOCK_BYTES)
    await until(lambda: receiver.bytes_received("shm"))
    assert not receiver.exchange.is_idle()
    await pair.close()
    await until(receiver.exchange.is_idle)
    with pytest.raises(WorkerFailed):
        await push.done
    receiver.check_all_is_free()


# Pulls


def hashes_of(worker: Worker, count: int) -> list[bytes]:
    """Cache blocks there, as a sequence's that has ended, and tell their hashes."""
    hashes = [bytes([number]) * 16 for number in range(count)]
    blocks = worker.pool.allocate(count)
    for block, digest in zip(blocks, hashes, strict=True):
        assert worker.pool.register(block, digest) == block
    worker.pool.release(blocks)
    return hashes


async def test_held_blocks_are_given_to_any_caller(make_worker: MakeWorker) -> None:
    holder, reader = await make_worker("decode-0"), await make_worker("prefill-0")
    hashes = hashes_of(holder, 3)
    ticket = reader.promise(holder, 5)
    stub = transfer_pb2_grpc.TransferServiceStub(reader.exchange.channel(holder.peer.address))
    response = await stub.Pull(
        transfer_pb2.PullRequest(
            fingerprint="model",
            geometry=convert.geometry_to_proto(GEOMETRY),
            holder="decode-0:1",
            reader="prefill-0:1",
            reader_address=reader.peer.address,
            ticket_id=ticket.ticket_id,
            block_hashes=[*hashes, b"unknown", b"unknown too"],
        ),
        timeout=DEADLINE_S,
    )
    assert response.blocks == 3
    held = holder.pool.match(hashes)
    assert np.array_equal(reader.data[ticket.missing[:3]], holder.data[held])
    assert ticket.awaited_bytes == 2 * BLOCK_BYTES
    assert holder.exchange.is_idle()
    holder.check_all_is_free()


async def test_nothing_held_is_given_without_a_pair(make_worker: MakeWorker) -> None:
    holder, reader = await make_worker("decode-0"), await make_worker("prefill-0")
    given = await holder.exchange.serve_pull(
        reader.identity, reader.peer, "decode-0:1", "t", [b"unknown"]
    )
    assert given == 0
    assert holder.exchange.pairs() == {}


@pytest.mark.parametrize(
    ("reader", "meant", "error"),
    [
        (Identity("prefill-0:1", "another", GEOMETRY), "decode-0:1", FingerprintMismatch),
        (
            Identity("prefill-0:1", "model", Geometry(4, 1, 1, 8, "float32")),
            "decode-0:1",
            GeometryMismatch,
        ),
        (Identity("prefill-0:1", "model", GEOMETRY), "decode-0:0", HandoffError),
    ],
)
async def test_strangers_are_given_nothing(
    make_worker: MakeWorker, reader: Identity, meant: str, error: type[BatonError]
) -> None:
    holder = await make_worker("decode-0")
    hashes = hashes_of(holder, 1)
    with pytest.raises(error):
        await holder.exchange.serve_pull(
            reader, Peer("prefill-0:1", "127.0.0.1:1"), meant, "t", hashes
        )
    holder.check_all_is_free()


async def test_what_is_given_is_pinned_until_it_has_gone(
    make_worker: MakeWorker, monkeypatch: pytest.MonkeyPatch
) -> None:
    holder, reader = await make_worker("decode-0"), await make_worker("prefill-0")
    hashes = hashes_of(holder, 2)
    ticket = reader.promise(holder, 2)
    go = asyncio.Event()
    outbound = holder.exchange.outbound

    async def late(peer: Peer) -> object:
        await go.wait()
        return await outbound(peer)

    monkeypatch.setattr(holder.exchange, "outbound", late)
    giving = asyncio.create_task(
        holder.exchange.serve_pull(
            reader.identity, reader.peer, "decode-0:1", ticket.ticket_id, hashes
        )
    )
    await until(lambda: holder.pool.counts().used == 2)
    assert not holder.exchange.is_idle()
    go.set()
    async with asyncio.timeout(DEADLINE_S):
        assert await giving == 2
    holder.check_all_is_free()


async def test_a_reader_that_leaves_ends_the_giving(make_worker: MakeWorker) -> None:
    holder, reader = await make_worker("decode-0"), await make_worker("prefill-0")
    hashes = hashes_of(holder, 2)
    ticket = reader.promise(holder, 2)
    pair = await holder.exchange.outbound(reader.peer)
    giving = asyncio.create_task(
        holder.exchange.serve_pull(
            reader.identity, reader.peer, "decode-0:1", ticket.ticket_id, hashes
        )
    )
    await asyncio.sleep(0)
    giving.cancel()
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(DEADLINE_S):
            await giving
    holder.check_all_is_free()
    assert holder.exchange.is_idle()
    assert not pair.broken.done()


async def test_a_reader_whose_ticket_has_ended_is_notified(make_worker: MakeWorker) -> None:
    holder, reader = await make_worker("decode-0"), await make_worker("prefill-0")
    hashes = hashes_of(holder, 2)
    with pytest.raises(TicketEnded):
        await holder.exchange.serve_pull(
            reader.identity, reader.peer, "decode-0:1", "unknown", hashes
        )
    holder.check_all_is_free()


async def test_the_channel_to_a_peer_goes_with_its_last_pair(make_worker: MakeWorker) -> None:
    writer, receiver = await make_worker("prefill-0"), await make_worker("decode-0")
    pairs = writer.exchange._pairs
    pair = await writer.exchange.outbound(receiver.peer)
    assert set(pairs._channels) == {receiver.peer.address}
    await receiver.server.stop(None)
    await until(pair.broken.done)
    writer.exchange.heartbeat()
    assert not pairs._channels
    again = await make_worker("decode-0")
    assert again.peer.address != receiver.peer.address
    await writer.exchange.outbound(again.peer)
    assert set(pairs._channels) == {again.peer.address}
    with pairs.using(receiver.peer.address):
        with pytest.raises(BatonError):
            await writer.exchange.outbound(receiver.peer)
        writer.exchange.heartbeat()
        assert receiver.peer.address in pairs._channels, "somebody uses it"
    writer.exchange.heartbeat()
    assert set(pairs._channels) == {again.peer.address}
    assert not +pairs._used
