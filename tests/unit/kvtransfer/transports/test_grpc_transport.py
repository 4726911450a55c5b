"""What is particular to the gRPC transport; what all do is in tests/transports."""

from __future__ import annotations

import gc
import json
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from baton.errors import BatonError, ChecksumMismatch, ConfigError, HandoffError, WorkerFailed
from baton.rpc.grpc_channel import open_blocking_channel
from baton.security.tls import TlsFiles
from baton.v1 import transfer_pb2
from kvtransfer.memory.checksum import checksum
from kvtransfer.memory.memory import HostMemory, PartByPart
from kvtransfer.transports import grpc_transport
from kvtransfer.transports.grpc_transport import CHUNK_BYTES, GrpcReceiveLink, GrpcTransport
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts, Peer
from tests.support.certificates import Authority

BLOCKS, BLOCK_BYTES = 6, CHUNK_BYTES // 2 + 64
DEADLINE_S = 20.0
WRITER, RECEIVER = Peer("writer", ""), Peer("receiver", "")


class World:
    """A writer and a receiver that are registered."""

    def __init__(self, stack: ExitStack, tls: tuple[TlsFiles | None, TlsFiles | None]) -> None:
        random = np.random.default_rng(1)
        shape = BLOCKS, BLOCK_BYTES
        self.theirs = random.integers(0, 256, shape, dtype=np.uint8)
        self.ours = random.integers(0, 256, shape, dtype=np.uint8)
        self.writer, self.receiver = GrpcTransport(tls=tls[0]), GrpcTransport(tls=tls[1])
        self.receiving = HostMemory(self.ours)
        for transport, memory in ((self.writer, self.theirs), (self.receiver, self.ours)):
            stack.callback(transport.close)
            transport.register(HostMemory(memory))
        self.link, self.answer = self.receiver.accept(WRITER, self.writer.offer())

    def raw(self, *messages: bytes, pair: str | None = None) -> grpc.StatusCode:
        """A stream of a stranger's making; how it ended."""
        answer = json.loads(self.answer)
        with closing(open_blocking_channel(answer["address"])) as channel:
            send: Any = channel.stream_unary("/baton.v1.BlockService/SendBlocks")
            metadata = (("baton-pair", answer["pair"] if pair is None else pair),)
            call = send.future(iter(messages), metadata=metadata, timeout=DEADLINE_S)
            code: grpc.StatusCode = call.code()
            return code

    def announce(self, number: int, sources: list[int], targets: list[int]) -> Transfer:
        """Whole blocks, as they are announced to the receiver."""
        batch = AnnouncedBatch(
            number,
            Parts(tuple(sources), 0, BLOCK_BYTES),
            Parts(tuple(targets), 0, BLOCK_BYTES),
            tuple(checksum(self.theirs[source].data) for source in sources),
        )
        return self.link.receive(batch, DEADLINE_S)

    def message(self, number: int, part: int, *sources: int) -> bytes:
        """As a writer's."""
        data = b"".join(self.theirs[source].tobytes() for source in sources)
        message = transfer_pb2.SendBlocksRequest(number=number, part=part, data=data)
        return message.SerializeToString()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    """Ends what a test has made."""
    with ExitStack() as stack:
        yield stack


@pytest.fixture
def world(stack: ExitStack) -> World:
    """Without TLS."""
    return World(stack, (None, None))


def assert_only(world: World, before: np.ndarray[Any, Any], targets: list[int]) -> None:
    """Only these blocks may have changed."""
    others = [block for block in range(BLOCKS) if block not in targets]
    assert np.array_equal(world.ours[others], before[others])


# Who may write


@pytest.mark.parametrize("pair", ["", "0" * 32])
def test_a_stream_for_no_pair_is_refused(world: World, pair: str) -> None:
    before, transfer = world.ours.copy(), world.announce(0, [1], [2])
    assert world.raw(world.message(0, 0, 1), pair=pair) is grpc.StatusCode.NOT_FOUND
    assert not transfer.poll()
    assert_only(world, before, [])


def test_another_method_is_not_served(world: World) -> None:
    with closing(open_blocking_channel(json.loads(world.answer)["address"])) as channel:
        other: Any = channel.unary_unary("/baton.v1.DecodeService/Abort")
        with pytest.raises(grpc.RpcError) as caught:
            other(b"", timeout=DEADLINE_S)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


def test_pairs_have_names_that_cannot_be_guessed_and_end_with_their_links(world: World) -> None:
    pairs = [world.receiver.accept(WRITER, world.writer.offer()) for _ in range(4)]
    names = {json.loads(answer)["pair"] for _, answer in pairs}
    assert len(names) == 4
    assert all(len(name) == 32 for name in names)
    for link, answer in pairs:
        name = json.loads(answer)["pair"]
        assert world.receiver.link_of(name) is link
        link.close()
        assert world.receiver.link_of(name) is None


def test_a_second_stream_of_a_pair_ends_it(world: World) -> None:
    """A process that knows the name of a pair is its writer, or has stolen the name."""
    sender = world.writer.connect(RECEIVER, world.answer)
    packed = sender.pack(0, Parts((1,), 0, BLOCK_BYTES))
    transfer = world.announce(0, [1], [2])
    sender.send(0, packed, DEADLINE_S)
    transfer.wait(DEADLINE_S)
    waits = world.announce(1, [3], [4])
    assert world.raw(world.message(1, 0, 3)) is grpc.StatusCode.ABORTED
    with pytest.raises(BatonError):
        waits.wait(DEADLINE_S)


def test_there_is_a_bound_to_the_pairs(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_transport, "MAX_PAIRS", 2)
    second, _ = world.receiver.accept(WRITER, b"{}")
    with pytest.raises(HandoffError, match="2 workers send blocks here already"):
        world.receiver.accept(WRITER, b"{}")
    second.close()
    world.receiver.accept(WRITER, b"{}")


def test_a_port_that_cannot_be_had_is_said() -> None:
    transport = GrpcTransport(host="192.0.2.1")  # reserved for documentation: RFC 5737
    with pytest.raises(ConfigError, match=r"cannot listen on 192\.0\.2\.1"):
        transport.register(HostMemory(np.zeros((1, 64), dtype=np.uint8)))
    transport.close()


# What is sent


def test_parts_of_one_batch_travel_in_messages_of_a_mebibyte(world: World) -> None:
    """Two blocks are more than that, so that each goes alone; small parts go together."""
    taken: list[tuple[int, int]] = []
    take = world.link.take

    def watch(message: bytes) -> None:
        parsed = transfer_pb2.SendBlocksRequest.FromString(message)
        taken.append((parsed.part, len(parsed.data)))
        take(message)

    world.link.take = watch  # type: ignore[method-assign]
    sender = world.writer.connect(RECEIVER, world.answer)
    transfer = world.announce(0, [1, 2, 3], [0, 5, 4])
    sender.send(0, sender.pack(0, Parts((1, 2, 3), 0, BLOCK_BYTES)), DEADLINE_S)
    transfer.wait(DEADLINE_S)
    assert taken == [(0, BLOCK_BYTES), (1, BLOCK_BYTES), (2, BLOCK_BYTES)]
    small = Parts((0, 1, 2), 0, 64)
    packed = sender.pack(0, small)
    transfer = world.link.receive(AnnouncedBatch(1, small, small, packed.checksums), DEADLINE_S)
    sender.send(1, packed, DEADLINE_S)
    transfer.wait(DEADLINE_S)
    assert taken[3:] == [(0, 192)]


def test_blocks_of_other_memory_are_copied_out_and_counted(world: World) -> None:
    sender = world.writer.connect(RECEIVER, world.answer)
    other = np.random.default_rng(9).integers(0, 256, (2, BLOCK_BYTES), dtype=np.uint8)
    kept = other.copy()
    packed = sender.pack(0, Parts((1, 0), 64, BLOCK_BYTES - 64), HostMemory(other))
    assert packed.checksums == tuple(checksum(kept[block, 64:].data) for block in (1, 0))
    assert world.writer.staging_bytes > packed.parts.bytes
    target = Parts((2, 3), 64, BLOCK_BYTES - 64)
    other[:] = 0  # it is a copy
    transfer = world.link.receive(
        AnnouncedBatch(0, packed.parts, target, packed.checksums), DEADLINE_S
    )
    sender.send(0, packed, DEADLINE_S)
    transfer.wait(DEADLINE_S)
    assert np.array_equal(world.ours[2:4, 64:], kept[[1, 0], 64:])
    del packed
    gc.collect()
    assert world.writer.staging_bytes == 0


def test_sending_is_over_when_the_payload_is_needed_no_longer(world: World) -> None:
    sender = world.writer.connect(RECEIVER, world.answer)
    packed = sender.pack(0, Parts((1, 2), 0, BLOCK_BYTES))
    world.announce(0, [1, 2], [1, 2])
    sender.send(0, packed, DEADLINE_S).wait(DEADLINE_S)


def test_without_a_listener(world: World) -> None:
    world.receiver.close()
    send_until_refused(world)


def send_until_refused(world: World) -> None:
    """gRPC may take messages before it knows that there is no connection."""
    sender = world.writer.connect(RECEIVER, world.answer)
    packed = sender.pack(0, Parts((1,), 0, BLOCK_BYTES))
    give_up, refused = time.monotonic() + DEADLINE_S, False
    while not refused:
        assert time.monotonic() < give_up
        try:
            sender.send(0, packed, DEADLINE_S).wait(DEADLINE_S)
        except WorkerFailed as error:
            refused = "receiver accepts no more blocks" in error.message
    sender.close()


# What comes


def test_a_message_of_another_implementation_is_understood(world: World) -> None:
    transfer = world.announce(0, [1, 3], [4, 0])
    assert world.raw(world.message(0, 0, 1), world.message(0, 1, 3)) is grpc.StatusCode.OK
    assert transfer.poll()
    assert np.array_equal(world.ours[[4, 0]], world.theirs[[1, 3]])


Messages = Callable[[World], list[bytes]]
WRONG: dict[str, Messages] = {
    "garbage": lambda world: [b"\xff\xff\xff"],
    "half a part": lambda world: [world.message(0, 0, 1)[:-32]],
    "no part": lambda world: [world.message(0, 0)],
    "a part too many": lambda world: [world.message(0, 0, 1, 3, 2)],
    "the second part first": lambda world: [world.message(0, 1, 3)],
    "a part twice": lambda world: [world.message(0, 0, 1), world.message(0, 0, 1)],
    "a batch twice": lambda world: [world.message(0, 0, 1, 3), world.message(0, 0, 1, 3)],
    "a batch of which nothing was said": lambda world: [world.message(9, 0, 1)],
}


@pytest.mark.parametrize("messages", WRONG.values(), ids=WRONG.keys())
def test_what_cannot_be_ends_the_pair(
    world: World, monkeypatch: pytest.MonkeyPatch, messages: Messages
) -> None:
    monkeypatch.setattr(grpc_transport, "_PATIENCE_S", 0.1)
    before = world.ours.copy()
    world.announce(0, [1, 3], [4, 0])
    second = world.announce(1, [2], [5])
    assert world.raw(*messages(world)) is grpc.StatusCode.ABORTED
    with pytest.raises(HandoffError, match="writer sent an invalid message"):
        second.wait(DEADLINE_S)
    with pytest.raises(HandoffError):
        world.announce(2, [2], [5]).poll()
    assert_only(world, before, [4, 0])


def test_waiting_for_a_batch_ends_with_its_link(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grpc_transport, "_PATIENCE_S", 3600.0)
    with ThreadPoolExecutor(1) as executor:
        taken = executor.submit(world.link.take, world.message(0, 0, 1))
        time.sleep(0.02)
        world.link.close()
        with pytest.raises(WorkerFailed, match="the pair was closed"):
            taken.result(DEADLINE_S)


class BrokenMemory(PartByPart, HostMemory):
    def write(self, block: int, offset: int, data: memoryview) -> int:
        raise OSError("no device")


def test_a_memory_that_cannot_be_written_fails_the_batch_with_its_error(world: World) -> None:
    link = GrpcReceiveLink(BrokenMemory(world.ours), "writer", lambda: None)
    whole = Parts((1,), 0, BLOCK_BYTES)
    transfer = link.receive(AnnouncedBatch(0, whole, whole, (1,)), DEADLINE_S)
    link.take(world.message(0, 0, 1))
    with pytest.raises(OSError, match="no device"):
        transfer.poll()


def test_what_follows_a_damaged_part_of_its_batch_is_passed_over(world: World) -> None:
    packed = Packed(Parts((1, 3), 0, BLOCK_BYTES), (1, checksum(world.theirs[3].data)))
    transfer = world.link.receive(
        AnnouncedBatch(0, packed.parts, Parts((4, 0), 0, BLOCK_BYTES), packed.checksums), DEADLINE_S
    )
    before = world.ours.copy()
    next_one = world.announce(1, [2], [5])
    messages = [world.message(0, 0, 1), world.message(0, 1, 3), world.message(1, 0, 2)]
    assert world.raw(*messages) is grpc.StatusCode.OK
    with pytest.raises(ChecksumMismatch):
        transfer.poll()
    assert next_one.poll()
    assert_only(world, before, [4, 5])


def test_a_writer_that_ends_its_stream_early(world: World) -> None:
    transfer = world.announce(0, [1, 3], [4, 0])
    assert world.raw(world.message(0, 0, 1)) is grpc.StatusCode.OK
    with pytest.raises(WorkerFailed, match="writer sends no more blocks"):
        transfer.poll()


@pytest.mark.parametrize("answer", [b"", b"[]", b"3", b'{"pair": "x"}', b"\xff"])
def test_an_answer_that_cannot_be_read_is_refused(world: World, answer: bytes) -> None:
    with pytest.raises(HandoffError, match="receiver has sent no valid address"):
        world.writer.connect(RECEIVER, answer)


# Mutual TLS


def check_nothing_goes(world: World) -> None:
    """The writer's link breaks; the receiver's still waits for a proven writer."""
    before = world.ours.copy()
    transfer = world.announce(0, [1], [2])
    send_until_refused(world)
    assert not transfer.poll(), "a stranger has ended the pair"
    assert_only(world, before, [])


def test_both_prove_themselves(stack: ExitStack, tmp_path: Path) -> None:
    authority = Authority(tmp_path, "authority")
    world = World(stack, (authority.sign("writer"), authority.sign("receiver")))
    transfer = world.announce(0, [1], [2])
    sender = world.writer.connect(RECEIVER, world.answer)
    sender.send(0, sender.pack(0, Parts((1,), 0, BLOCK_BYTES)), DEADLINE_S)
    transfer.wait(DEADLINE_S)
    assert np.array_equal(world.ours[2], world.theirs[1])
    sender.close()


def test_strangers_neither_send_nor_receive(stack: ExitStack, tmp_path: Path) -> None:
    """Without a certificate, or with one that another authority signed."""
    authority, other = Authority(tmp_path, "authority"), Authority(tmp_path, "other")
    receiver, stranger = authority.sign("receiver"), other.sign("stranger")
    pretender = TlsFiles(stranger.certificate, stranger.key, authority.certificate)
    for writer in (None, stranger, pretender):
        check_nothing_goes(World(stack, (writer, receiver)))
    # And a writer gives nothing to a receiver that cannot prove itself.
    for other_receiver in (None, stranger):
        check_nothing_goes(World(stack, (receiver, other_receiver)))


def test_trusting_the_authority_is_not_enough(stack: ExitStack, tmp_path: Path) -> None:
    """A client that shows no certificate at all is refused."""
    authority = Authority(tmp_path, "authority")
    world = World(stack, (None, authority.sign("receiver")))
    answer = json.loads(world.answer)
    credentials = grpc.ssl_channel_credentials(authority.certificate.read_bytes())
    transfer = world.announce(0, [1], [2])
    with closing(grpc.secure_channel(answer["address"], credentials)) as channel:
        send: Any = channel.stream_unary("/baton.v1.BlockService/SendBlocks")
        metadata = (("baton-pair", answer["pair"]),)
        with pytest.raises(grpc.RpcError) as caught:
            send(iter([world.message(0, 0, 1)]), metadata=metadata, timeout=DEADLINE_S)
    assert isinstance(caught.value, grpc.Call)
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert not transfer.poll()
