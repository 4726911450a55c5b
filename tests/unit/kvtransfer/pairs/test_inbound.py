"""The receiver's ends of pairs, over a real gRPC stream; the bytes land when the test decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import grpc.aio
import numpy as np
import pytest

from baton.errors import BatonError, ChecksumMismatch, HandoffError, TicketEnded, WorkerFailed
from baton.request import Geometry
from baton.rpc import convert
from baton.rpc.grpc_channel import make_server, open_channel
from baton.rpc.grpc_errors import error_from_code, error_from_rpc
from baton.v1 import transfer_pb2, transfer_pb2_grpc
from kvtransfer.memory.seal_board import BOARD_BYTES, Seal, SealBoard
from kvtransfer.pairs import inbound as inbound_module
from kvtransfer.pairs.inbound import Inbound
from kvtransfer.pairs.pair import Identity, PairLimits, seal_checksums
from kvtransfer.tickets import Ticket
from kvtransfer.transports.in_place import ReadReceiveLink
from kvtransfer.transports.transport import AnnouncedBatch, Parts, Peer
from tests.support.kvtransfer.fake_transport import FakeReceiveLink, FakeTransport

DEADLINE_S = 20.0
GEOMETRY = Geometry(2, 1, 1, 8, "float32")
RECEIVER = Identity("decode-0:1", "model", GEOMETRY)
WRITER = Identity("prefill-0:1", "model", GEOMETRY)
BLOCK_BYTES = 64
LIMITS = PairLimits(window_bytes=4096, silence_s=3.0, batch_deadline_s=30.0)

Request = transfer_pb2.TransferRequest
Response = transfer_pb2.TransferResponse
Call = grpc.aio.StreamStreamCall[Request, Response]


def make_ticket(ticket_id: str = "t", writer: str = WRITER.incarnation) -> Ticket:
    return Ticket(
        ticket_id,
        ("r", 0),
        writer,
        missing=[5, 6, 7],
        pinned=[],
        block_bytes=BLOCK_BYTES,
        lease_s=3.0,
        now=0.0,
    )


@dataclass
class Keeper:
    """Has some tickets, and records its messages."""

    tickets: dict[str, Ticket] = field(default_factory=dict)
    told: list[tuple[str, ...]] = field(default_factory=list)
    errors: list[BatonError] = field(default_factory=list)
    clock: Callable[[], float] = time.monotonic

    def begin_copy(
        self,
        ticket_id: str,
        writer: str,
        transport: str,
        targets: Sequence[int],
        offset: int,
        length: int,
        now: float,
        rank: int = 0,
    ) -> tuple[int, ...] | None:
        if ticket_id not in self.tickets:
            raise TicketEnded(f"ticket {ticket_id} is unknown here")
        return self.tickets[ticket_id].begin_copy(targets, offset, length, now, rank)

    def end_copy(self, ticket_id: str, transport: str, copied: int) -> None:
        self.told.append(("end", ticket_id, transport, str(copied)))
        self.tickets[ticket_id].end_copy()

    def fail_copy(self, ticket_id: str, error: BatonError, now: float) -> None:
        self.told.append(("fail", ticket_id, error.code or ""))
        self.tickets[ticket_id].release()
        self.tickets[ticket_id].end_copy()

    def drop_copy(self, ticket_id: str) -> None:
        self.told.append(("drop", ticket_id))
        self.tickets[ticket_id].end_copy()

    def renew(self, writer: str, ticket_ids: Sequence[str], now: float) -> list[str]:
        return [ticket_id for ticket_id in ticket_ids if ticket_id not in self.tickets]

    def writer_gone(self, writer: str, now: float) -> None:
        self.told.append(("gone", writer))


class Servicer(transfer_pb2_grpc.TransferServiceServicer):
    def __init__(self, inbound: Inbound) -> None:
        self._inbound = inbound

    async def Transfer(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[Request],
        context: grpc.aio.ServicerContext[Request, Response],
    ) -> None:
        await self._inbound.serve(request_iterator, context)

    async def Pull(  # noqa: N802
        self, request: transfer_pb2.PullRequest, context: object
    ) -> transfer_pb2.PullResponse:
        raise NotImplementedError


class World:
    """A receiver, and a stub for writers."""

    def __init__(self, *transports: FakeTransport) -> None:
        self.keeper = Keeper({"t": make_ticket()})
        self.transports = transports
        self.inbound = Inbound(RECEIVER, transports, self.keeper, LIMITS)
        self.stub: transfer_pb2_grpc.TransferServiceAsyncStub

    @property
    def link(self) -> FakeReceiveLink:
        """Of the pair that was opened last."""
        return self.transports[0].receive_links[-1]

    async def open(self, message: transfer_pb2.OpenPair | None = None) -> Call:
        """A pair's stream, and its answer read."""
        call: Call = self.stub.Transfer(timeout=DEADLINE_S)
        await call.write(Request(open=message or hello()))
        answer = await read(call)
        assert answer.HasField("opened")
        return call

    async def refusal(self, *requests: Request) -> BatonError:
        """What a stream that begins so ends with."""
        call: Call = self.stub.Transfer(timeout=DEADLINE_S)
        for request in requests:
            await call.write(request)
        return await ending(call)


MakeWorld = Callable[..., Awaitable[World]]


@pytest.fixture
async def make_world() -> AsyncIterator[MakeWorld]:
    """Makes a ``World`` that serves."""
    async with AsyncExitStack() as stack:

        async def make(*transports: FakeTransport) -> World:
            world = World(*(transports or (FakeTransport(),)))
            server = make_server()
            transfer_pb2_grpc.add_TransferServiceServicer_to_server(Servicer(world.inbound), server)
            port = server.add_insecure_port("127.0.0.1:0")
            await server.start()
            stack.push_async_callback(server.stop, None)
            channel = open_channel(f"127.0.0.1:{port}")
            stack.push_async_callback(channel.close)
            world.stub = transfer_pb2_grpc.TransferServiceStub(channel)
            return world

        yield make


@pytest.fixture
async def world(make_world: MakeWorld) -> World:
    """With one transport."""
    return await make_world()


def hello(*transports: str, **changes: str | bool) -> transfer_pb2.OpenPair:
    """As of the writer."""
    message = transfer_pb2.OpenPair(
        fingerprint=WRITER.fingerprint,
        writer=WRITER.incarnation,
        receiver=RECEIVER.incarnation,
        geometry=convert.geometry_to_proto(GEOMETRY),
        offers=[
            transfer_pb2.TransportOffer(transport=name, offer=f"of {name}".encode())
            for name in transports or ("shm",)
        ],
    )
    for name, value in changes.items():
        setattr(message, name, value)
    return message


def sealed(checksum: int, ticket_id: str, target: int, offset: int) -> tuple[int, ...]:
    return seal_checksums([checksum], ticket_id, [target], offset)


def announcement(
    number: int, *targets: int, ticket_id: str = "t", offset: int = 0, length: int = BLOCK_BYTES
) -> Request:
    """Of blocks 20, 21, … whose checksums are 1000, 1001, …"""
    return Request(
        announced=[
            transfer_pb2.AnnounceBatch(
                number=number,
                ticket_id=ticket_id,
                offset=offset,
                length=length,
                targets=targets,
                sources=[20 + target for target in targets],
                checksums=seal_checksums(
                    [1000 + target for target in targets], ticket_id, targets, offset
                ),
            )
        ]
    )


async def read(call: Call) -> Response:
    answer = await call.read()
    assert isinstance(answer, Response), "the stream has ended"
    return answer


_LANDED: WeakKeyDictionary[Call, deque[transfer_pb2.BatchLanded]] = WeakKeyDictionary()


async def landed(call: Call) -> transfer_pb2.BatchLanded:
    """The next batch that has; several may be reported at a time."""
    waiting = _LANDED.setdefault(call, deque())
    while not waiting:
        waiting.extend((await read(call)).landed)
    return waiting.popleft()


async def ending(call: Call) -> BatonError:
    """What a stream ends with, once its other answers are read."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
        raise AssertionError(f"ended well: {await call.code()}")
    except grpc.aio.AioRpcError as error:
        return error_from_rpc(error, "receiver")


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not condition():
            await asyncio.sleep(0.002)


# Opening


@pytest.mark.parametrize(
    ("changes", "code", "words"),
    [
        ({"fingerprint": "other"}, "handoff_fingerprint_mismatch", "serves other"),
        (
            {"receiver": "decode-0:0"},
            "handoff_failed",
            "decode-0:0 is gone; this worker is decode-0:1",
        ),
    ],
)
async def test_strangers_are_refused(
    world: World, changes: dict[str, str], code: str, words: str
) -> None:
    error = await world.refusal(Request(open=hello(**changes)))
    assert error.code == code
    assert words in error.message
    assert world.transports[0].accepted == []
    assert world.keeper.told == []


async def test_the_fingerprint_comes_before_the_geometry(world: World) -> None:
    geometry = convert.geometry_to_proto(replace(GEOMETRY, layers=9))
    for fingerprint, code in (
        ("other", "handoff_fingerprint_mismatch"),
        ("model", "handoff_geometry_mismatch"),
    ):
        message = hello(fingerprint=fingerprint)
        message.geometry.CopyFrom(geometry)
        assert (await world.refusal(Request(open=message))).code == code


async def test_a_batch_of_a_transport_that_encrypts_needs_no_checksums(
    make_world: MakeWorld,
) -> None:
    nixl = FakeTransport("nixl")
    nixl.encrypts = True
    world = await make_world(nixl)
    world.keeper.tickets["t"] = make_ticket()
    call = await world.open(hello("nixl"))
    message = announcement(0, 0, 1)
    del message.announced[0].checksums[:]
    message.announced[0].staged_at = 4096
    await call.write(message)
    await until(lambda: nixl.receive_links[0].batches)
    (batch,) = nixl.receive_links[0].batches
    assert (batch.checksums, batch.staged_at) == ((), 4096)
    nixl.receive_links[0].transfers[0].finish()
    assert [landed.code for landed in (await read(call)).landed] == [""]


async def test_the_best_common_transport_is_taken(make_world: MakeWorld) -> None:
    shm, grpc_ = FakeTransport("shm"), FakeTransport("grpc")
    world = await make_world(grpc_, shm)
    call = world.stub.Transfer(timeout=DEADLINE_S)
    await call.write(Request(open=hello("gloo", "grpc", "shm")))
    opened = (await read(call)).opened
    assert (opened.transport, opened.answer) == ("shm", b"answer of shm")
    assert opened.window_bytes == 4 * LIMITS.window_bytes, "nothing is staged"
    assert convert.geometry_from_proto(opened.geometry) == GEOMETRY
    assert shm.accepted == [(Peer(WRITER.incarnation, ""), b"of shm")]
    assert grpc_.accepted == []
    assert world.inbound.pairs() == {WRITER.incarnation: "shm"}


async def test_the_next_best_is_taken_where_the_best_cannot(make_world: MakeWorld) -> None:
    grpc_ = FakeTransport("grpc")
    world = await make_world(grpc_, FakeTransport("shm", refuses=True))
    await world.open(hello("shm", "grpc"))
    assert world.inbound.pairs() == {WRITER.incarnation: "grpc"}


def fallbacks(caplog: pytest.LogCaptureFixture) -> list[tuple[int, str]]:
    """What was logged of transports that were wanted and not taken."""
    return [
        (record.levelno, record.getMessage())
        for record in caplog.records
        if " instead of " in record.getMessage()
    ]


async def test_the_first_fallback_is_a_warning(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = await make_world(FakeTransport("grpc"), FakeTransport("cuda_ipc", refuses=True))
    with caplog.at_level(logging.INFO, inbound_module.__name__):
        await world.open(hello("cuda_ipc", "grpc"))
        await world.open(hello("cuda_ipc", "grpc"))
        await world.open(hello("grpc"))
    message = (
        f"{WRITER.name} sends blocks to {RECEIVER.name} by grpc instead of cuda_ipc: "
        "cuda_ipc cannot"
    )
    assert fallbacks(caplog) == [(logging.WARNING, message), (logging.INFO, message)]


async def test_the_best_that_both_have_is_no_fallback(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    world = await make_world(FakeTransport("shm"), FakeTransport("grpc"))
    with caplog.at_level(logging.INFO, inbound_module.__name__):
        await world.open(hello("shm", "grpc"))
        await world.open(hello("cuda_ipc", "grpc"))
    assert fallbacks(caplog) == []


async def test_a_fallback_of_blocks_that_are_converted_is_a_warning(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture
) -> None:
    grpc_ = FakeTransport("grpc")
    grpc_.copies_out = True
    world = await make_world(FakeTransport("shm"), grpc_)
    message = hello("shm", "grpc")
    message.geometry.CopyFrom(convert.geometry_to_proto(replace(GEOMETRY, block_size=24)))
    with caplog.at_level(logging.WARNING, inbound_module.__name__):
        await world.open(message)
    [(_, text)] = fallbacks(caplog)
    assert "by grpc instead of shm: it sends blocks unconverted" in text


@pytest.mark.parametrize(
    ("theirs", "level"), [("elsewhere", logging.INFO), ("here", logging.WARNING)]
)
async def test_a_fallback_between_two_hosts_is_no_warning(
    make_world: MakeWorld, caplog: pytest.LogCaptureFixture, theirs: str, level: int
) -> None:
    shm = FakeTransport("shm", refuses=True, offer=b'{"boot_id": "here"}')
    world = await make_world(shm, FakeTransport("grpc"))
    message = hello("grpc")
    offer = f'{{"boot_id": "{theirs}"}}'.encode()
    message.offers.append(transfer_pb2.TransportOffer(transport="shm", offer=offer))
    with caplog.at_level(logging.INFO, inbound_module.__name__):
        await world.open(message)
    assert [found for found, _ in fallbacks(caplog)] == [level]


async def test_none_that_works_names_each_and_why(make_world: MakeWorld) -> None:
    world = await make_world(
        FakeTransport("shm", refuses=True), FakeTransport("grpc", refuses=True)
    )
    error = await world.refusal(Request(open=hello("shm", "grpc")))
    assert "shm: shm cannot; grpc: grpc cannot" in error.message
    error = await world.refusal(Request(open=hello("gloo")))
    assert "the peer has gloo; this worker has grpc, shm" in error.message


async def test_a_pair_is_opened_first_and_once(world: World) -> None:
    error = await world.refusal(announcement(0, 0))
    assert "first message must open it" in error.message
    call = await world.open()
    await call.write(Request(open=hello()))
    assert "opened only once" in (await ending(call)).message
    await until(lambda: world.link.is_closed)


# Batches


async def test_a_batch_goes_where_the_receiver_says_and_its_arrival_is_reported(
    world: World,
) -> None:
    call = await world.open()
    await call.write(announcement(0, 2, 0, offset=16, length=32))
    await until(lambda: world.link.batches)
    (batch,) = world.link.batches
    assert batch.number == 0
    assert batch.source == Parts((22, 20), 16, 32)
    assert batch.target == Parts((7, 5), 16, 32)
    assert batch.checksums == (1002, 1000)
    assert world.keeper.told == []
    assert world.link.transfers[0].begin()
    world.link.transfers[0].finish()
    answer = await landed(call)
    assert (answer.number, answer.code, answer.error) == (0, "", "")
    assert world.keeper.told == [("end", "t", "shm", "64")]


async def test_batches_land_in_whatever_order(world: World) -> None:
    call = await world.open()
    for number in range(3):
        await call.write(announcement(number, number))
    await until(lambda: len(world.link.batches) == 3)
    for number in (2, 0, 1):
        world.link.transfers[number].finish()
        assert (await landed(call)).number == number
    assert world.keeper.tickets["t"].is_complete


async def test_a_ticket_that_is_unknown_refuses_its_batch_and_harms_no_other(
    world: World,
) -> None:
    call = await world.open()
    await call.write(announcement(0, 0, ticket_id="another"))
    answer = await landed(call)
    assert isinstance(error_from_code(answer.code, answer.error), TicketEnded)
    assert world.link.batches[0].target.blocks == ()
    with pytest.raises(CancelledError):
        world.link.transfers[0].poll()
    await call.write(announcement(1, 1))
    await until(lambda: len(world.link.batches) == 2)
    world.link.transfers[1].finish()
    answer = await landed(call)
    assert (answer.number, answer.code) == (1, "")
    assert world.keeper.told == [("end", "t", "shm", "64")]


async def test_a_batch_that_is_there_already_has_landed(world: World) -> None:
    call = await world.open()
    await call.write(announcement(0, 0))
    await call.write(announcement(1, 0))
    answer = await landed(call)
    assert (answer.number, answer.code) == (1, "")
    assert world.link.batches[1].target.blocks == ()
    assert world.keeper.told == []
    assert world.keeper.tickets["t"].copies == 1


async def test_damage_fails_the_ticket_and_not_the_pair(world: World) -> None:
    world.keeper.tickets["u"] = make_ticket("u")
    call = await world.open()
    await call.write(announcement(0, 0))
    await call.write(announcement(1, 0, ticket_id="u"))
    await until(lambda: len(world.link.batches) == 2)
    world.link.transfers[0].fail(ChecksumMismatch("a part arrived damaged"))
    answer = await landed(call)
    assert isinstance(error_from_code(answer.code, answer.error), ChecksumMismatch)
    assert answer.error == "a part arrived damaged"
    world.link.transfers[1].finish()
    assert (await landed(call)).code == ""
    assert world.keeper.told == [
        ("fail", "t", "handoff_checksum_mismatch"),
        ("end", "u", "shm", "64"),
    ]
    assert not world.link.is_closed


@pytest.mark.parametrize("sealed_for", [("u", 0, 0), ("t", 1, 0), ("t", 0, 16)])
async def test_parts_sealed_for_another_place_are_not_those_expected(
    world: World, sealed_for: tuple[str, int, int]
) -> None:
    """The same bytes of another ticket, block or offset would pass for these."""
    call = await world.open()
    message = announcement(0, 0)
    message.announced[0].checksums[:] = sealed(1000, *sealed_for)
    await call.write(message)
    await until(lambda: world.link.batches)
    assert world.link.batches[0].checksums != (1000,)


@pytest.mark.parametrize("sealed_for", [("u", 0, 0), ("t", 1, 0), ("t", 0, 16)])
async def test_a_seal_for_another_place_fails_the_ticket(
    in_place: World, sealed_for: tuple[str, int, int]
) -> None:
    world = in_place
    call = await world.open()
    await call.write(unsealed(0, 0))
    await place_unsealed(world, 0, 1000)
    wrong = transfer_pb2.SealBatch(number=0, checksums=sealed(1000, *sealed_for))
    await call.write(Request(sealed=[wrong]))
    answer = await landed(call)
    assert isinstance(error_from_code(answer.code, answer.error), ChecksumMismatch)
    assert world.keeper.told == [("fail", "t", "handoff_checksum_mismatch")]


class OneBlock:
    """Implements ``Copier`` without copying; its checksums are those of the test."""

    blocks, part_end = 64, BLOCK_BYTES

    def copy(self, batch: AnnouncedBatch) -> tuple[int, ...]:
        """See ``Copier``."""
        return tuple(980 + block for block in batch.source.blocks)


class BoardTransport(FakeTransport):
    """Its receiver reads the writer's board."""

    def __init__(self) -> None:
        super().__init__(reads_in_place=True)
        self.file = np.zeros(BOARD_BYTES, dtype=np.uint8)
        self.board = SealBoard(self.file.view(np.uint64), 0)
        self.executor = ThreadPoolExecutor(1)

    def accept(  # type: ignore[override]
        self, peer: Peer, offer: bytes
    ) -> tuple[ReadReceiveLink[OneBlock], bytes]:
        """See ``Transport``."""
        return ReadReceiveLink(OneBlock(), self.executor, self.file), b"board"

    def announce(self) -> tuple[Request, Seal]:
        """A batch of block 20 for missing block 0."""
        seal = self.board.take(1)
        assert seal is not None
        request = announcement(0, 0)
        del request.announced[0].checksums[:]
        request.announced[0].seal_at, request.announced[0].seal_mark = seal.at, seal.mark
        return request, seal


@pytest.fixture
async def on_board(make_world: MakeWorld) -> AsyncIterator[tuple[World, BoardTransport]]:
    """A receiver that reads the writer's board."""
    transport = BoardTransport()
    yield await make_world(transport), transport
    transport.executor.shutdown()


@pytest.mark.parametrize("is_late", [False, True])
async def test_checksums_on_the_board_need_no_message(
    on_board: tuple[World, BoardTransport], *, is_late: bool
) -> None:
    world, transport = on_board
    call = await world.open()
    request, seal = transport.announce()
    if not is_late:
        seal.publish(sealed(1000, "t", 0, 0))
    await call.write(request)
    if is_late:
        # Other messages are served meanwhile.
        await call.write(Request(renew=transfer_pb2.RenewLeases(ticket_ids=["t"])))
        assert (await read(call)).HasField("renewed")
        assert world.keeper.told == []
        seal.publish(sealed(1000, "t", 0, 0))
    answer = await landed(call)
    assert (answer.number, answer.code) == (0, "")
    assert world.keeper.told == [("end", "t", "shm", str(BLOCK_BYTES))]


async def test_wrong_checksums_on_the_board_fail_the_ticket(
    on_board: tuple[World, BoardTransport],
) -> None:
    world, transport = on_board
    call = await world.open()
    request, seal = transport.announce()
    seal.publish(sealed(1000, "t", 1, 0))
    await call.write(request)
    answer = await landed(call)
    assert isinstance(error_from_code(answer.code, answer.error), ChecksumMismatch)
    assert world.keeper.told == [("fail", "t", "handoff_checksum_mismatch")]


async def test_a_pair_that_ends_before_its_checksums_are_on_the_board_fails_the_ticket(
    on_board: tuple[World, BoardTransport],
) -> None:
    world, transport = on_board
    call = await world.open()
    request, _ = transport.announce()
    await call.write(request)
    await until(lambda: world.keeper.tickets["t"].copies)
    await call.done_writing()
    await until(lambda: len(world.keeper.told) == 2)
    assert set(world.keeper.told) == {
        ("gone", WRITER.incarnation),
        ("fail", "t", "worker_failed"),
    }
    assert world.keeper.tickets["t"].copies == 0


async def test_a_release_cancels_what_has_not_begun_and_waits_for_what_has(world: World) -> None:
    call = await world.open()
    for number in range(2):
        await call.write(announcement(number, number))
    await until(lambda: len(world.link.batches) == 2)
    first, second = world.link.transfers
    assert first.begin()
    ticket = world.keeper.tickets["t"]
    ticket.release()
    world.inbound.released(ticket, TicketEnded("aborted"))
    answer = await landed(call)
    assert answer.number == 1
    assert isinstance(error_from_code(answer.code, answer.error), TicketEnded)
    assert not first.poll()
    assert ticket.is_quarantined
    assert not second.begin()
    first.pause()
    assert (await landed(call)).number == 0
    assert world.keeper.told == [("drop", "t"), ("drop", "t")]
    assert not ticket.is_quarantined
    assert not world.link.is_closed


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (WorkerFailed("the link broke"), "worker_failed"),
        (OSError("no device"), "handoff_failed"),
    ],
)
async def test_a_link_that_fails_closes_its_pair(world: World, error: Exception, code: str) -> None:
    call = await world.open()
    for number in range(2):
        await call.write(announcement(number, number))
    await until(lambda: len(world.link.batches) == 2)
    world.link.transfers[0].fail(error)
    assert (await ending(call)).code == code
    await until(lambda: len(world.keeper.told) == 3)
    assert world.link.is_closed
    assert sorted(world.keeper.told)[:2] == sorted(
        [("fail", "t", code), ("fail", "t", "worker_failed")]
    )
    assert ("gone", WRITER.incarnation) in world.keeper.told
    assert world.keeper.tickets["t"].copies == 0
    assert world.inbound.pairs() == {}


WRONG = {
    "a number that was left out": announcement(1, 0),
    "no parts": announcement(0),
    "a checksum too few": Request(
        announced=[
            transfer_pb2.AnnounceBatch(
                ticket_id="t", length=8, targets=[0, 1], sources=[0, 1], checksums=[1]
            )
        ]
    ),
    "a source too many": Request(
        announced=[
            transfer_pb2.AnnounceBatch(
                ticket_id="t", length=8, targets=[0], sources=[0, 1], checksums=[1]
            )
        ]
    ),
    "opened again": Request(open=transfer_pb2.OpenPair()),
}


@pytest.mark.parametrize("message", WRONG.values(), ids=WRONG.keys())
async def test_a_message_that_cannot_be_closes_the_pair(world: World, message: Request) -> None:
    call = await world.open()
    await call.write(message)
    assert isinstance(await ending(call), HandoffError)
    await until(lambda: world.keeper.told == [("gone", WRITER.incarnation)])
    assert world.link.is_closed
    assert world.link.batches == []


@pytest.mark.parametrize(
    "message",
    [
        announcement(0, 3),
        announcement(0, 0, offset=32, length=64),
        announcement(0, 0, 0),
        announcement(0, 0, length=0),
    ],
)
async def test_parts_that_the_ticket_has_not_are_refused_and_dropped(
    world: World, message: Request
) -> None:
    call = await world.open()
    await call.write(message)
    answer = await landed(call)
    assert answer.code == "handoff_failed"
    assert world.link.batches[0].target.blocks == ()
    assert world.keeper.tickets["t"].copies == 0


# Heartbeats and endings


async def test_a_heartbeat_is_answered_with_the_tickets_that_have_ended(world: World) -> None:
    call = await world.open()
    renewal = transfer_pb2.RenewLeases(ticket_ids=["t", "ended", "unknown"])
    await call.write(Request(renew=renewal))
    answer = await read(call)
    assert answer.HasField("renewed")
    assert list(answer.renewed.ended_ticket_ids) == ["ended", "unknown"]


async def test_a_writer_that_ends_its_stream_is_gone(world: World) -> None:
    call = await world.open()
    await call.write(announcement(0, 0))
    await until(lambda: world.link.batches)
    await call.done_writing()
    assert await call.read() is grpc.aio.EOF
    await until(lambda: len(world.keeper.told) == 2)
    assert set(world.keeper.told) == {
        ("gone", WRITER.incarnation),
        ("fail", "t", "worker_failed"),
    }
    assert world.link.is_closed
    assert not world.link.transfers[0].begin()


async def test_a_writer_whose_connection_breaks_is_gone(world: World) -> None:
    call = await world.open()
    await call.write(announcement(0, 0))
    await until(lambda: world.link.batches)
    call.cancel()
    await until(lambda: ("gone", WRITER.incarnation) in world.keeper.told)
    assert world.link.is_closed
    assert world.inbound.pairs() == {}


async def test_a_silent_writer_is_given_up_while_it_owes_bytes(world: World) -> None:
    call = await world.open()
    later = time.monotonic() + LIMITS.silence_s + 1.0
    world.inbound.sweep(later)
    assert not world.link.is_closed, "it owes nothing"
    await call.write(announcement(0, 0))
    await until(lambda: world.link.batches)
    world.inbound.sweep(time.monotonic())
    assert not world.link.is_closed
    world.inbound.sweep(later + 1.0)
    assert world.link.is_closed
    error = await ending(call)
    assert isinstance(error, WorkerFailed)
    assert "prefill-0:1 is silent" in error.message


async def test_bytes_that_never_come_are_given_up_though_their_writer_lives(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    call = await world.open()
    await call.write(announcement(0, 0))
    await until(lambda: world.link.batches)
    pair = world.inbound._pairs[WRITER.incarnation, 0]
    for seconds, gives_up in ((29.0, False), (31.0, True)):
        now = time.monotonic() + seconds
        monkeypatch.setattr(pair, "_heard_at", now)  # it has just been heard
        world.inbound.sweep(now)
        assert world.link.is_closed is gives_up
    error = await ending(call)
    assert error.code == "deadline_exceeded"
    assert "batch 0 of prefill-0:1 did not arrive" in error.message


async def test_a_writer_that_reopens_its_pair_ends_the_old_one(world: World) -> None:
    old = await world.open()
    old_link = world.link
    new = await world.open()
    error = await ending(old)
    assert isinstance(error, WorkerFailed)
    assert "opened its pair again" in error.message
    assert old_link.is_closed
    assert not world.link.is_closed
    await new.write(announcement(0, 0))
    await until(lambda: world.link.batches)
    world.link.transfers[0].finish()
    assert (await landed(new)).number == 0
    assert ("gone", WRITER.incarnation) not in world.keeper.told
    assert world.inbound.pairs() == {WRITER.incarnation: "shm"}


async def test_writers_have_pairs_of_their_own(world: World) -> None:
    """One that breaks leaves the other's alone."""
    first = await world.open()
    second = await world.open(hello(writer="prefill-1:1"))
    first.cancel()
    await until(lambda: world.keeper.told == [("gone", WRITER.incarnation)])
    await second.write(announcement(0, 0))
    await until(lambda: world.link.batches)
    world.link.transfers[0].finish()
    assert (await landed(second)).number == 0


async def test_closing_ends_every_pair(world: World) -> None:
    calls = [await world.open(), await world.open(hello(writer="prefill-1:1"))]
    await calls[0].write(announcement(0, 0))
    await until(lambda: world.transports[0].receive_links[0].batches)
    world.inbound.close()
    world.inbound.close()
    for call in calls:
        assert "decode-0:1 is stopping" in (await ending(call)).message
    await until(lambda: world.inbound.pairs() == {})
    assert all(link.is_closed for link in world.transports[0].receive_links)
    assert not world.transports[0].receive_links[0].transfers[0].begin()


# Checksums that follow


def unsealed(number: int, *targets: int) -> Request:
    """As ``announcement``, without checksums."""
    request = announcement(number, *targets)
    del request.announced[0].checksums[:]
    return request


def seal(number: int, *targets: int, first: int = 1000) -> Request:
    """The checksums of ``announcement``."""
    checksums = seal_checksums([first + target for target in targets], "t", targets, 0)
    return Request(sealed=[transfer_pb2.SealBatch(number=number, checksums=checksums)])


async def place_unsealed(world: World, number: int, *found: int) -> None:
    """Of the batch with that number, at the receiver."""
    await until(lambda: len(world.link.batches) > number)
    assert world.link.batches[number].checksums == ()
    transfer = world.link.transfers[number]
    assert transfer.begin()
    transfer.found = found
    transfer.finish()


@pytest.fixture
async def in_place(make_world: MakeWorld) -> World:
    """Its transport reads the writer's blocks where they lie."""
    return await make_world(FakeTransport(reads_in_place=True))


@pytest.mark.parametrize("seal_first", [True, False])
async def test_bytes_count_once_they_are_placed_and_sealed(
    in_place: World, *, seal_first: bool
) -> None:
    world = in_place
    call = await world.open()
    await call.write(unsealed(0, 2, 0))
    if seal_first:
        await call.write(seal(0, 2, 0))
        await call.write(unsealed(1, 1))  # taken in, so the seal is
        await until(lambda: len(world.link.batches) == 2)
    else:
        await place_unsealed(world, 0, 1002, 1000)
    await asyncio.sleep(0.02)
    assert world.keeper.told == []
    if seal_first:
        await place_unsealed(world, 0, 1002, 1000)
    else:
        await call.write(seal(0, 2, 0))
    answer = await landed(call)
    assert (answer.number, answer.code) == (0, "")
    assert world.keeper.told == [("end", "t", "shm", "128")]


async def test_a_seal_that_is_another_fails_the_ticket_and_not_the_pair(in_place: World) -> None:
    world = in_place
    call = await world.open()
    await call.write(unsealed(0, 0, 1))
    await place_unsealed(world, 0, 1000, 1001)
    await call.write(seal(0, 0, 1, first=1001))
    answer = await landed(call)
    assert isinstance(error_from_code(answer.code, answer.error), ChecksumMismatch)
    assert world.keeper.told == [("fail", "t", "handoff_checksum_mismatch")]
    assert not world.link.is_closed
    await call.write(seal(0, 0, 1))
    await call.write(announcement(1, 2, ticket_id="another"))
    assert (await landed(call)).number == 1, "a seal of what has ended is no matter"


async def test_a_batch_may_be_sealed_from_the_start(in_place: World) -> None:
    world = in_place
    call = await world.open()
    await call.write(announcement(0, 0))
    await until(lambda: world.link.batches)
    assert world.link.batches[0].checksums == (1000,)
    world.link.transfers[0].finish()
    assert (await landed(call)).code == ""


@pytest.mark.parametrize("wrong", [seal(0, 0), seal(0)])
async def test_a_seal_that_does_not_fit_closes_the_pair(in_place: World, wrong: Request) -> None:
    world = in_place
    call = await world.open()
    await call.write(unsealed(0, 0, 1))
    await place_unsealed(world, 0, 1000, 1001)
    await call.write(wrong)
    assert isinstance(await ending(call), HandoffError)
    await until(lambda: len(world.keeper.told) == 2)
    assert world.keeper.told == [("fail", "t", "worker_failed"), ("gone", WRITER.incarnation)]
    assert world.keeper.tickets["t"].copies == 0


async def test_a_batch_is_sealed_once(in_place: World) -> None:
    world = in_place
    call = await world.open()
    await call.write(unsealed(0, 0))
    await call.write(seal(0, 0))
    await call.write(seal(0, 0))
    assert isinstance(await ending(call), HandoffError)
    await until(lambda: world.keeper.tickets["t"].copies == 0)


async def test_what_was_placed_and_never_sealed_fails_with_its_pair(in_place: World) -> None:
    world = in_place
    call = await world.open()
    await call.write(unsealed(0, 0))
    await call.write(unsealed(1, 1))
    await call.write(unsealed(2, 2))
    for number in range(2):
        await place_unsealed(world, number, 1000 + number)
    call.cancel()
    await until(lambda: world.keeper.tickets["t"].copies == 0)
    assert not world.keeper.tickets["t"].is_complete or not world.keeper.tickets["t"].is_open
    assert [told[0] for told in world.keeper.told].count("end") == 0
    assert world.inbound.pairs() == {}


async def test_a_released_ticket_ends_with_its_seal(in_place: World) -> None:
    world = in_place
    call = await world.open()
    await call.write(unsealed(0, 0))
    await place_unsealed(world, 0, 1000)
    ticket = world.keeper.tickets["t"]
    await asyncio.sleep(0.02)
    ticket.release()
    world.inbound.released(ticket, TicketEnded("aborted"))
    assert ticket.is_quarantined
    await call.write(seal(0, 0))
    assert (await landed(call)).number == 0
    assert not ticket.is_quarantined


async def test_checksums_are_needed_where_a_transport_compares_them(world: World) -> None:
    call = await world.open()
    await call.write(unsealed(0, 0))
    assert "different numbers" in (await ending(call)).message
