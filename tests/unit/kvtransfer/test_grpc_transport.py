"""Segments over a real gRPC connection: they arrive, or the handoff fails loudly."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import grpc.aio
import pytest

from baton.errors import (
    BatonError,
    ChecksumMismatch,
    HandoffError,
    TicketEnded,
    WorkerFailed,
)
from baton.grpc_channel import make_server, open_channel
from baton.grpc_errors import error_from_rpc
from baton.v1 import transfer_pb2, transfer_pb2_grpc
from kvtransfer.checksum import checksum, segment_checksum
from kvtransfer.grpc_transport import BlockSender, TransferServicer
from kvtransfer.ticket import SEGMENT_BYTES, Ticket

BLOCK_BYTES = SEGMENT_BYTES + 24
DEADLINE_S = 20.0


class Memory:
    """Blocks on the heap."""

    def __init__(self, blocks: int, seed: int | None = None) -> None:
        source = random.Random(seed)
        filled = seed is not None
        self.blocks = [
            bytearray(source.randbytes(BLOCK_BYTES) if filled else bytes(BLOCK_BYTES))
            for _ in range(blocks)
        ]

    @property
    def block_bytes(self) -> int:
        return BLOCK_BYTES

    def read(self, block: int, offset: int, length: int) -> bytes:
        return bytes(self.blocks[block][offset : offset + length])

    def write(self, block: int, offset: int, data: bytes) -> None:
        self.blocks[block][offset : offset + len(data)] = data


@dataclass
class Sink:
    """A control loop with one ticket."""

    ticket: Ticket
    errors: list[BaseException] = field(default_factory=list)
    bytes: int = 0

    def begin_copy(
        self, ticket_id: str, block_index: int, offset: int, length: int, now: float
    ) -> int | None:
        if ticket_id != self.ticket.ticket_id:
            raise TicketEnded(f"ticket {ticket_id} is unknown here")
        return self.ticket.begin_copy(block_index, offset, length, now)

    def end_copy(self, ticket_id: str, length: int) -> None:
        self.bytes += length
        self.ticket.end_copy()

    def fail_copy(self, ticket_id: str, error: BaseException) -> None:
        self.errors.append(error)
        self.ticket.release()
        self.ticket.end_copy()


@dataclass
class Receiver:
    """A receiving worker's end of the transport, and how to reach it."""

    sink: Sink
    memory: Memory
    servicer: TransferServicer
    channel: grpc.aio.Channel
    executor: ThreadPoolExecutor


@asynccontextmanager
async def receiver(missing: int = 2) -> AsyncIterator[Receiver]:
    ticket = Ticket(
        "t",
        ("r", 0),
        "w",
        missing=list(range(missing, 0, -1)),
        pinned=[],
        block_bytes=BLOCK_BYTES,
        lease_s=3.0,
        now=0.0,
    )
    memory = Memory(missing + 1)
    with ThreadPoolExecutor(2) as executor:
        servicer = TransferServicer(Sink(ticket), memory, executor)
        server = make_server()
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with open_channel(f"127.0.0.1:{port}") as channel:
            sink = servicer._sink
            assert isinstance(sink, Sink)
            yield Receiver(sink, memory, servicer, channel, executor)
        await server.stop(None)


def segment(
    data: bytes, *, offset: int = 0, index: int = 0, **other: object
) -> transfer_pb2.PushBlocksRequest:
    digest = segment_checksum(checksum(data), "t", index, offset)
    fields: dict[str, object] = {"ticket_id": "t", "checksum": digest} | other
    return transfer_pb2.PushBlocksRequest(
        block_index=index,
        offset=offset,
        data=data,
        **fields,  # type: ignore[arg-type]
    )


async def push(channel: grpc.aio.Channel, *segments: transfer_pb2.PushBlocksRequest) -> int:
    stub = transfer_pb2_grpc.TransferServiceStub(channel)
    try:
        response = await stub.PushBlocks(iter(segments), timeout=DEADLINE_S)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, "peer") from error
    return int(response.bytes)


async def test_blocks_arrive_as_they_were() -> None:
    async with receiver() as there:
        source = Memory(9, seed=1)
        sender = BlockSender(there.channel, "t", source, there.executor)
        running = asyncio.create_task(sender.run("peer", DEADLINE_S))
        sender.put(1, 7)
        await asyncio.sleep(0)
        sender.put(0, 4)
        sender.end()
        assert await running == 2 * BLOCK_BYTES == there.sink.bytes
        assert there.sink.ticket.is_complete
        first, second = there.sink.ticket.missing
        assert there.memory.blocks[first] == source.blocks[4]
        assert there.memory.blocks[second] == source.blocks[7]
        assert there.memory.blocks[0] == bytes(BLOCK_BYTES), "a block of nobody was written"


async def test_nothing_to_send() -> None:
    async with receiver(missing=0) as there:
        sender = BlockSender(there.channel, "t", Memory(1), there.executor)
        sender.end()
        assert await sender.run("peer", DEADLINE_S) == 0


async def test_a_flipped_byte_fails_the_handoff() -> None:
    async with receiver() as there:
        data = random.Random(1).randbytes(SEGMENT_BYTES)
        damaged = bytearray(data)
        damaged[12345] ^= 1
        with pytest.raises(ChecksumMismatch, match="segment at 0 of block 0 of ticket t"):
            await push(there.channel, segment(bytes(damaged), checksum=segment(data).checksum))
        assert [type(error) for error in there.sink.errors] == [ChecksumMismatch]
        assert not any(any(block) for block in there.memory.blocks), "it was copied all the same"
        with pytest.raises(TicketEnded):
            await push(there.channel, segment(data))


async def test_a_segment_cannot_pass_for_another() -> None:
    """Its bytes are whole; where they belong was damaged on the way."""
    async with receiver() as there:
        astray = segment(random.Random(1).randbytes(SEGMENT_BYTES))
        astray.block_index = 1
        with pytest.raises(ChecksumMismatch):
            await push(there.channel, astray)
        assert not any(any(block) for block in there.memory.blocks)


async def test_a_duplicate_is_neither_copied_nor_counted() -> None:
    async with receiver() as there:
        data, other = bytes([1]) * SEGMENT_BYTES, bytes([2]) * SEGMENT_BYTES
        assert await push(there.channel, segment(data), segment(other)) == SEGMENT_BYTES
        assert there.memory.blocks[there.sink.ticket.missing[0]][:SEGMENT_BYTES] == data


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"ticket_id": "another"}, TicketEnded),
        ({"index": 2}, HandoffError),
        ({"offset": 8}, HandoffError),
    ],
)
async def test_what_cannot_be_is_refused(
    changes: dict[str, object], error: type[BatonError]
) -> None:
    async with receiver() as there:
        with pytest.raises(error):
            await push(there.channel, segment(bytes(SEGMENT_BYTES), **changes))  # type: ignore[arg-type]
        assert there.sink.ticket.copies == 0


async def test_a_released_ticket_takes_nothing_more() -> None:
    async with receiver() as there:
        there.sink.ticket.release()
        with pytest.raises(TicketEnded, match="released"):
            await push(there.channel, segment(b"\1" * SEGMENT_BYTES))
        assert not any(any(block) for block in there.memory.blocks)


async def test_a_memory_that_cannot_be_written_fails_the_handoff() -> None:
    async with receiver() as there:

        def write(block: int, offset: int, data: bytes) -> None:
            raise OSError("no device")

        there.memory.write = write  # type: ignore[method-assign]
        with pytest.raises(BatonError, match="OSError"):
            await push(there.channel, segment(bytes(SEGMENT_BYTES)))
        assert [type(error) for error in there.sink.errors] == [OSError]
        assert there.sink.ticket.copies == 0


async def test_a_copy_that_was_never_made_is_no_arrival() -> None:
    """Its thread pool was shut down first."""
    async with receiver() as there:
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        there.sink.begin_copy("t", 0, 0, SEGMENT_BYTES, 0.0)
        done.cancel()
        there.servicer._copied("t", SEGMENT_BYTES, done)
        assert there.sink.bytes == 0
        assert not there.sink.ticket.is_open
        assert there.sink.ticket.copies == 0


async def test_the_end_of_a_copy_is_told_although_the_call_was_cancelled() -> None:
    async with receiver() as there:
        began, go = Future[None](), Future[None]()
        write = there.memory.write

        def slow(block: int, offset: int, data: bytes) -> None:
            began.set_result(None)
            go.result(DEADLINE_S)
            write(block, offset, data)

        there.memory.write = slow  # type: ignore[method-assign]
        call = asyncio.create_task(push(there.channel, segment(b"\1" * SEGMENT_BYTES)))
        await asyncio.wait_for(asyncio.wrap_future(began), DEADLINE_S)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        there.sink.ticket.release()
        assert there.sink.ticket.is_quarantined
        go.set_result(None)
        async with asyncio.timeout(DEADLINE_S):
            while there.sink.ticket.copies:
                await asyncio.sleep(0.005)
        assert there.sink.bytes == SEGMENT_BYTES


async def test_the_sender_tells_who_is_gone() -> None:
    with ThreadPoolExecutor(1) as executor:
        server = make_server()
        port = server.add_insecure_port("127.0.0.1:0")
        async with open_channel(f"127.0.0.1:{port}") as channel:
            sender = BlockSender(channel, "t", Memory(1), executor)
            sender.end()
            with pytest.raises(WorkerFailed, match="decode-0"):
                await sender.run("decode-0", 0.3)


async def test_a_sender_that_is_cancelled_is_cancelled() -> None:
    async with receiver() as there:
        sender = BlockSender(there.channel, "t", Memory(1), there.executor)
        running = asyncio.create_task(sender.run("peer", DEADLINE_S))
        sender.put(0, 0)
        async with asyncio.timeout(DEADLINE_S):
            while there.sink.bytes < BLOCK_BYTES:
                await asyncio.sleep(0.005)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
