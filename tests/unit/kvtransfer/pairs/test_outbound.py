"""The writer's end of a pair, against a receiver over real gRPC with scripted answers."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import grpc.aio
import numpy as np
import pytest

from baton.errors import (
    BatonError,
    ChecksumMismatch,
    FingerprintMismatch,
    HandoffError,
    TicketEnded,
    WorkerFailed,
)
from baton.request import Geometry
from baton.rpc import convert
from baton.rpc.grpc_channel import make_server, open_channel
from baton.rpc.grpc_errors import grpc_boundary
from baton.v1 import transfer_pb2, transfer_pb2_grpc
from kvtransfer.memory.memory import BlockMemory, HostMemory
from kvtransfer.memory.seal_board import BOARD_BYTES, SealBoard, read_seal
from kvtransfer.pairs.outbound import Outbound, Push
from kvtransfer.pairs.pair import Identity, PairLimits, seal_checksums
from kvtransfer.transports.in_place import ReadSendLink
from kvtransfer.transports.staging import Staging
from kvtransfer.transports.transport import Packed, Parts, Peer
from tests.support.kvtransfer.fake_transport import FakeSendLink, FakeTransport

DEADLINE_S = 60.0
GEOMETRY = Geometry(2, 1, 1, 8, "float32")
WRITER = Identity("prefill-0:1", "model", GEOMETRY)
SIZE = 64
"""Bytes of a block, and of a part: a batch has two."""

Request = transfer_pb2.TransferRequest
Response = transfer_pb2.TransferResponse


class Receiver(transfer_pb2_grpc.TransferServiceServicer):
    """One stream: keeps what it hears, and says what is put into ``answers``; an error ends it."""

    def __init__(self, first: Response | BatonError | None) -> None:
        """``first`` answers the opening; None: nothing does."""
        self.first = first
        self.heard: list[Request] = []
        self.answers: asyncio.Queue[Response | BatonError | None] = asyncio.Queue()
        self.is_over = False

    async def Transfer(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[Request],
        context: grpc.aio.ServicerContext[Request, Response],
    ) -> None:
        async with grpc_boundary(context):  # type: ignore[arg-type]
            reading = asyncio.create_task(self._read(request_iterator))
            try:
                if self.first is not None:
                    self.answers.put_nowait(self.first)
                while (answer := await self.answers.get()) is not None:
                    if isinstance(answer, BatonError):
                        raise answer
                    await context.write(answer)
            finally:
                self.is_over = True
                reading.cancel()

    async def _read(self, requests: AsyncIterator[Request]) -> None:
        async for request in requests:
            self.heard.append(request)

    async def Pull(  # noqa: N802
        self, request: transfer_pb2.PullRequest, context: object
    ) -> transfer_pb2.PullResponse:
        raise NotImplementedError

    @property
    def announced(self) -> list[transfer_pb2.AnnounceBatch]:
        """The batches that it has heard of."""
        return [batch for request in self.heard for batch in request.announced]

    @property
    def renewals(self) -> list[list[str]]:
        """The tickets of each heartbeat that it has heard."""
        return [list(r.renew.ticket_ids) for r in self.heard if r.HasField("renew")]

    def landed(self, number: int, error: BatonError | None = None) -> None:
        """Report that they have landed."""
        landed = transfer_pb2.BatchLanded(number=number)
        if error is not None:
            landed.error, landed.code = error.message, error.code or ""
        self.answers.put_nowait(Response(landed=[landed]))


def opened(transport: str = "shm", window_bytes: int = 1 << 20) -> Response:
    return Response(
        opened=transfer_pb2.PairOpened(
            transport=transport,
            answer=b"the answer",
            window_bytes=window_bytes,
            geometry=convert.geometry_to_proto(GEOMETRY),
        )
    )


class World:
    """A writer's end and what it talks to."""

    def __init__(self, receiver: Receiver, *transports: FakeTransport) -> None:
        self.receiver = receiver
        self.transport = transports[0]
        self.executor = ThreadPoolExecutor(1)
        self.peer = Peer("decode-0:1", "")
        self.limits = PairLimits(silence_s=3.0)
        self.pair = Outbound(WRITER, self.peer, transports, self.limits, self.executor)
        self.channel: grpc.aio.Channel
        self.server: grpc.aio.Server

    @property
    def link(self) -> FakeSendLink:
        """The pair's."""
        return self.transport.send_links[-1]

    async def open(self, deadline_s: float = DEADLINE_S) -> None:
        await self.pair.open(self.channel, deadline_s)

    async def announced(self, count: int) -> list[transfer_pb2.AnnounceBatch]:
        """Once the receiver has received this number of batches."""
        await until(lambda: len(self.receiver.announced) >= count)
        assert len(self.receiver.announced) == count
        return self.receiver.announced

    async def broken(self) -> BatonError:
        """What breaks the pair."""
        async with asyncio.timeout(DEADLINE_S):
            return await asyncio.shield(self.pair.broken)


MakeWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def make_world() -> AsyncIterator[MakeWorld]:
    """Makes a ``World`` whose receiver is served."""
    async with AsyncExitStack() as stack:

        async def make(first: Response | BatonError | None, *transports: FakeTransport) -> World:
            world = World(Receiver(first), *(transports or (FakeTransport(),)))
            stack.callback(world.executor.shutdown)
            world.server = make_server()
            transfer_pb2_grpc.add_TransferServiceServicer_to_server(world.receiver, world.server)
            port = world.server.add_insecure_port("127.0.0.1:0")
            await world.server.start()
            stack.push_async_callback(world.server.stop, None)
            world.channel = open_channel(f"127.0.0.1:{port}")
            stack.push_async_callback(world.channel.close)
            stack.push_async_callback(world.pair.close)
            return world

        yield make


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    """Whose pair is open."""
    made = await make_world(opened())
    await made.open()
    return made


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


async def a_while() -> None:
    """For what must not happen."""
    await asyncio.sleep(0.05)


async def result(push: Push) -> int:
    async with asyncio.timeout(DEADLINE_S):
        return await asyncio.shield(push.done)


def put(push: Push, *blocks: int) -> None:
    """Block n goes to missing block n."""
    for block in blocks:
        push.put(block, block, 0, SIZE)


# Opening


async def test_it_offers_what_it_has_and_connects_by_what_was_chosen(make_world: MakeWorld) -> None:
    shm, grpc_ = FakeTransport("shm"), FakeTransport("grpc")
    world = await make_world(opened("grpc"), shm, grpc_)
    assert world.pair.transport == ""
    await world.open()
    assert world.pair.transport == "grpc"
    assert (grpc_.connected, shm.connected) == ([(world.peer, b"the answer")], [])
    # It answers every caller, before it has received anything.
    await until(lambda: bool(world.receiver.heard))
    hello = world.receiver.heard[0].open
    assert (hello.fingerprint, hello.writer, hello.receiver) == (
        "model",
        "prefill-0:1",
        "decode-0:1",
    )
    assert convert.geometry_from_proto(hello.geometry) == GEOMETRY
    assert {offer.transport: offer.offer for offer in hello.offers} == {
        "shm": b"offer of shm",
        "grpc": b"offer of grpc",
    }


async def test_what_the_receiver_reads_is_kept_until_it_has_landed(make_world: MakeWorld) -> None:
    world = await make_world(opened(), FakeTransport())
    await world.open()
    staging = world.link.staging = Staging(128 + 32)
    push = world.pair.push("t")
    for block in (0, 1):
        push.put(block, block, 0, 64)
    push.put(2, 2, 0, 32)
    batches = await world.announced(2)
    assert world.link.numbers == [0, 1]
    assert [(list(batch.checksums), batch.staged_at) for batch in batches] == [([], 0), ([], 128)]
    assert not has_room(staging, 1)
    world.receiver.landed(0)
    await until(lambda: has_room(staging, 128))
    assert not has_room(staging, 129)
    await world.pair.close()
    assert has_room(staging, 160)


def has_room(staging: Staging, size: int) -> bool:
    """Whether there is room at this moment."""
    try:
        staging.take(size, lambda: False).release()
    except WorkerFailed:
        return False
    return True


@pytest.mark.parametrize(
    ("first", "transport", "words"),
    [
        (FingerprintMismatch("we serve another"), FakeTransport(), "we serve another"),
        (opened("pigeon"), FakeTransport(), "chose 'pigeon'"),
        (opened(), FakeTransport(refuses=True), "shm cannot"),
    ],
)
async def test_a_refusal_is_raised_and_breaks_the_pair(
    make_world: MakeWorld,
    first: Response | BatonError,
    transport: FakeTransport,
    words: str,
) -> None:
    world = await make_world(first, transport)
    with pytest.raises(HandoffError, match=words) as caught:
        await world.open()
    assert (await world.broken()).message == caught.value.message
    await until(lambda: world.receiver.is_over)
    push = world.pair.push("t")
    with pytest.raises(HandoffError, match=words):
        await result(push)


async def test_a_receiver_that_does_not_answer_is_given_up(make_world: MakeWorld) -> None:
    world = await make_world(None)
    with pytest.raises(TimeoutError):
        await world.open(0.1)
    assert isinstance(await world.broken(), WorkerFailed)
    await until(lambda: world.receiver.is_over)


async def test_without_a_listener(make_world: MakeWorld) -> None:
    world = await make_world(None)
    await world.server.stop(None)
    with pytest.raises(WorkerFailed, match="decode-0:1"):
        await world.open()
    assert isinstance(await world.broken(), WorkerFailed)


# Pushes


async def test_a_push_is_done_when_its_last_byte_has_landed(world: World) -> None:
    push = world.pair.push("t")
    put(push, 3, 1, 4)
    first, second = await world.announced(2)
    assert (first.number, first.ticket_id, first.offset, first.length) == (0, "t", 0, SIZE)
    assert list(first.targets) == list(first.sources) == [3, 1]
    assert tuple(first.checksums) == seal_checksums([1003, 1001], "t", [3, 1], 0)
    assert not {1003, 1001} & set(first.checksums), "bound to nothing"
    assert (second.number, list(second.targets)) == (1, [4])
    assert world.link.packed == [Parts((3, 1), 0, SIZE), Parts((4,), 0, SIZE)]
    assert [packed.parts for packed, _ in world.link.sent.values()] == world.link.packed
    world.receiver.landed(0)
    push.end()
    await a_while()
    assert not push.done.done()
    world.receiver.landed(1)
    assert await result(push) == 3 * SIZE


async def test_a_push_that_has_not_ended_is_not_done(world: World) -> None:
    push = world.pair.push("t")
    put(push, 0)
    await world.announced(1)
    world.receiver.landed(0)
    await a_while()
    assert not push.done.done()
    put(push, 1)
    push.end()
    put(push, 2)  # after its end: nothing
    await world.announced(2)
    world.receiver.landed(1)
    assert await result(push) == 2 * SIZE
    await a_while()
    await world.announced(2)


async def test_nothing_to_push(world: World) -> None:
    push = world.pair.push("t")
    push.end()
    assert await result(push) == 0
    assert world.receiver.announced == []


async def test_blocks_of_a_later_push_do_not_wait_for_all_of_an_earlier(world: World) -> None:
    long, short = world.pair.push("long"), world.pair.push("short")
    put(long, *range(6))
    put(short, 0)
    announced = await world.announced(4)
    assert [each.ticket_id for each in announced] == ["long", "short", "long", "long"]


async def test_no_more_is_announced_than_the_receiver_has_room_for(make_world: MakeWorld) -> None:
    world = await make_world(opened(window_bytes=2 * SIZE + SIZE))
    await world.open()
    push = world.pair.push("t")
    put(push, *range(6))
    await world.announced(1)
    await a_while()
    for number in range(3):
        await world.announced(number + 1)
        world.receiver.landed(number)
    push.end()
    assert await result(push) == 6 * SIZE


async def test_a_window_smaller_than_a_batch_lets_one_through_at_a_time(
    make_world: MakeWorld,
) -> None:
    world = await make_world(opened(window_bytes=1))
    await world.open()
    push = world.pair.push("t")
    put(push, *range(4))
    push.end()
    for number in range(2):
        await world.announced(number + 1)
        await a_while()
        await world.announced(number + 1)
        world.receiver.landed(number)
    assert await result(push) == 4 * SIZE


async def test_the_receivers_error_fails_that_push_alone(world: World) -> None:
    bad, good = world.pair.push("bad"), world.pair.push("good")
    put(bad, 0)
    put(good, 0)
    await world.announced(2)
    world.receiver.landed(0, ChecksumMismatch("a part arrived damaged"))
    with pytest.raises(ChecksumMismatch, match="arrived damaged"):
        await result(bad)
    put(bad, 1)
    good.end()
    world.receiver.landed(1)
    assert await result(good) == SIZE
    await world.announced(2)
    assert not world.pair.broken.done()


async def test_a_push_that_fails_is_done_once_nothing_of_it_is_on_its_way(world: World) -> None:
    push = world.pair.push("t")
    put(push, *range(4))
    await world.announced(2)
    world.receiver.landed(0, TicketEnded("aborted"))
    await a_while()
    assert not push.done.done(), "its second batch may still be read"
    world.receiver.landed(1, TicketEnded("aborted"))
    with pytest.raises(TicketEnded):
        await result(push)


async def test_canceling_sends_no_more_and_waits_for_what_is_on_its_way(world: World) -> None:
    push = world.pair.push("t")
    put(push, 0)
    await world.announced(1)
    world.link.may_pack.clear()
    put(push, 1, 2)
    await asyncio.sleep(0)
    put(push, 3)
    push.cancel()
    push.cancel()
    world.link.may_pack.set()
    world.receiver.landed(0)
    await a_while()
    for number in range(1, len(world.receiver.announced)):
        world.receiver.landed(number)
    with pytest.raises(TicketEnded, match="given up by its writer"):
        await result(push)
    assert all(3 not in each.targets for each in world.receiver.announced)


async def test_what_is_being_packed_counts_as_on_its_way(world: World) -> None:
    """Its blocks must not be given back while they are read."""
    world.link.may_pack.clear()
    push = world.pair.push("t")
    put(push, 0)
    await until(world.executor._work_queue.empty)
    await a_while()
    push.cancel()
    await a_while()
    assert not push.done.done()
    world.link.may_pack.set()
    await world.announced(1)
    world.receiver.landed(0)
    with pytest.raises(TicketEnded):
        await result(push)


async def test_a_batch_that_lands_twice_or_was_never_sent_is_nothing(world: World) -> None:
    push = world.pair.push("t")
    put(push, 0, 1)
    await world.announced(1)
    world.receiver.landed(7)
    world.receiver.landed(0)
    world.receiver.landed(0)
    put(push, 2)
    push.end()
    await world.announced(2)
    await a_while()
    assert not push.done.done()
    world.receiver.landed(1)
    assert await result(push) == 3 * SIZE


# Heartbeats


async def test_heartbeats_name_what_is_being_pushed_and_end_what_has_ended_there(
    world: World,
) -> None:
    world.pair.heartbeat(10.0)
    kept, ended = world.pair.push("kept"), world.pair.push("ended")
    world.pair.heartbeat(11.0)
    await until(lambda: world.receiver.renewals)
    assert world.receiver.renewals == [["kept", "ended"]]
    renewed = transfer_pb2.LeasesRenewed(ended_ticket_ids=["ended", "unknown"])
    world.receiver.answers.put_nowait(Response(renewed=renewed))
    with pytest.raises(TicketEnded, match="decode-0:1 has ended ticket ended"):
        await result(ended)
    assert not kept.done.done()
    world.pair.heartbeat(13.5)
    assert not world.pair.broken.done()


async def test_a_silent_receiver_is_given_up(world: World) -> None:
    push = world.pair.push("t")
    put(push, 0)
    await world.announced(1)
    world.pair.heartbeat(10.0)
    world.pair.heartbeat(12.9)
    assert not world.pair.broken.done()
    world.pair.heartbeat(13.0)
    error = await world.broken()
    assert isinstance(error, WorkerFailed)
    assert "decode-0:1 was silent for 3.0 s" in error.message
    with pytest.raises(WorkerFailed, match="silent"):
        await result(push)
    assert world.link.is_closed


async def test_an_idle_pair_owes_no_heartbeat_but_a_used_one_does(world: World) -> None:
    for now in (10.0, 20.0, 30.0):
        world.pair.heartbeat(now)
    assert not world.pair.broken.done()
    with world.pair.used():
        world.pair.heartbeat(40.0)
        world.pair.heartbeat(43.0)
    assert isinstance(await world.broken(), WorkerFailed)
    assert world.receiver.renewals in ([], [[]])


# Endings


async def test_a_receiver_that_ends_the_pair_says_why(world: World) -> None:
    push = world.pair.push("t")
    put(push, 0)
    await world.announced(1)
    world.receiver.answers.put_nowait(HandoffError("a link broke"))
    with pytest.raises(HandoffError, match="a link broke"):
        await result(push)
    assert (await world.broken()).message == "a link broke"
    assert world.link.is_closed
    late = world.pair.push("u")
    put(late, 0)
    with pytest.raises(HandoffError, match="a link broke"):
        await result(late)


async def test_a_receiver_that_ends_the_stream_without_a_word(world: World) -> None:
    world.receiver.answers.put_nowait(None)
    error = await world.broken()
    assert isinstance(error, WorkerFailed)
    assert "decode-0:1 ended the stream" in error.message


async def test_a_receiver_that_is_gone(world: World) -> None:
    push = world.pair.push("t")
    put(push, 0)
    await world.announced(1)
    await world.server.stop(None)
    with pytest.raises(BatonError):
        await result(push)
    assert isinstance(await world.broken(), WorkerFailed)


async def test_a_transport_that_fails_breaks_the_pair(world: World) -> None:
    push = world.pair.push("t")
    put(push, 0)
    await world.announced(1)
    _, transfer = world.link.sent[0]
    transfer.fail(WorkerFailed("the link broke"))
    with pytest.raises(WorkerFailed, match="the link broke"):
        await result(push)
    assert world.link.is_closed
    await until(lambda: world.receiver.is_over)


async def test_blocks_that_cannot_be_read_break_the_pair(world: World) -> None:
    def pack(parts: Parts, memory: object = None, key: object = None) -> object:
        raise OSError("no device")

    world.link.pack = pack  # type: ignore[method-assign,assignment]
    push = world.pair.push("t")
    put(push, 0)
    with pytest.raises(HandoffError, match="a pair failed: OSError"):
        await result(push)


async def test_closing_fails_its_pushes_and_leaves_no_task(world: World) -> None:
    before = asyncio.all_tasks()
    pushes = [world.pair.push("t"), world.pair.push("u")]
    put(pushes[0], 0)
    await world.announced(1)
    await world.pair.close()
    await world.pair.close()
    for push in pushes:
        with pytest.raises(WorkerFailed, match="was closed"):
            await result(push)
    assert world.link.is_closed
    assert all(task.done() for task in before if task.get_name().startswith("pair-"))
    world.pair.heartbeat(time.monotonic())


async def test_closing_waits_until_nothing_is_read(world: World) -> None:
    world.link.may_pack.clear()
    push = world.pair.push("t")
    put(push, 0)
    await until(lambda: world.executor._threads and world.executor._work_queue.empty())
    closing = asyncio.create_task(world.pair.close())
    await a_while()
    assert not closing.done()
    world.link.may_pack.set()
    async with asyncio.timeout(DEADLINE_S):
        await closing
    with contextlib.suppress(WorkerFailed):
        await result(push)


async def test_what_is_read_in_place_is_announced_before_its_checksums_are_known(
    make_world: MakeWorld,
) -> None:
    world = await make_world(opened(), FakeTransport(reads_in_place=True))
    await world.open()
    world.link.may_pack.clear()
    push = world.pair.push("t")
    put(push, 3, 1)
    (batch,) = await world.announced(1)
    assert list(batch.targets) == [3, 1]
    assert not batch.checksums
    assert not [seal for request in world.receiver.heard for seal in request.sealed]
    world.link.may_pack.set()
    await until(lambda: any(request.sealed for request in world.receiver.heard))
    (seal,) = [seal for request in world.receiver.heard for seal in request.sealed]
    assert seal.number == batch.number
    assert tuple(seal.checksums) == seal_checksums([1003, 1001], "t", [3, 1], 0)
    world.receiver.landed(0)
    push.end()
    assert await result(push) == 2 * SIZE


class BoardLink(ReadSendLink):
    """Packs when the test decides."""

    def __init__(self, board: SealBoard) -> None:
        super().__init__(HostMemory(np.zeros((4, SIZE), dtype=np.uint8)), board)
        self.may_pack = threading.Event()

    def pack(self, number: int, parts: Parts, memory: BlockMemory | None = None) -> Packed:
        """See ``SendLink``. The checksum of a block is 1000 and its number."""
        assert self.may_pack.wait(DEADLINE_S)
        return Packed(parts, tuple(1000 + block for block in parts.blocks))


class BoardTransport(FakeTransport):
    """Has one region left on its board."""

    def __init__(self) -> None:
        super().__init__(reads_in_place=True)
        self.file = np.zeros(BOARD_BYTES, dtype=np.uint8)
        self.board = SealBoard(self.file.view(np.uint64), 0)
        while (seal := self.board.take(1)) is not None:
            self.last = seal
        self.board.give_back(self.last)
        self.link = BoardLink(self.board)

    def connect(self, peer: Peer, answer: bytes) -> BoardLink:  # type: ignore[override]
        """See ``Transport``."""
        return self.link

    def region_is_free(self) -> bool:
        """Whether a batch could publish its checksums."""
        seal = self.board.take(1)
        if seal is not None:
            self.board.give_back(seal)
        return seal is not None


async def test_checksums_are_published_where_the_receiver_reads_them(
    make_world: MakeWorld,
) -> None:
    transport = BoardTransport()
    world = await make_world(opened(), transport)
    await world.open()
    push = world.pair.push("t")
    put(push, 3, 1)
    (batch,) = await world.announced(1)
    assert (batch.seal_at, len(batch.checksums)) == (transport.last.at, 0)
    assert read_seal(transport.file, batch.seal_at, batch.seal_mark, 2) is None
    transport.link.may_pack.set()
    expected = seal_checksums([1003, 1001], "t", [3, 1], 0)
    await until(lambda: read_seal(transport.file, batch.seal_at, batch.seal_mark, 2) == expected)
    assert not transport.region_is_free()
    # No region is left for this one.
    put(push, 2)
    await until(lambda: any(request.sealed for request in world.receiver.heard))
    (message,) = [seal for request in world.receiver.heard for seal in request.sealed]
    assert message.number == 1
    assert not world.receiver.announced[1].HasField("seal_at")
    for number in range(2):
        world.receiver.landed(number)
    push.end()
    assert await result(push) == 3 * SIZE
    assert transport.region_is_free()


@pytest.mark.parametrize("breaks", [True, False])
async def test_a_region_is_free_once_no_thread_publishes_there(
    make_world: MakeWorld, *, breaks: bool
) -> None:
    transport = BoardTransport()
    world = await make_world(opened(), transport)
    await world.open()
    push = world.pair.push("t")
    put(push, 3)
    await world.announced(1)
    if breaks:
        world.receiver.answers.put_nowait(WorkerFailed("the receiver breaks"))
    else:
        world.receiver.landed(0, TicketEnded("refused"))
    with pytest.raises(BatonError):
        await result(push)
    assert not transport.region_is_free()
    transport.link.may_pack.set()
    await until(transport.region_is_free)
