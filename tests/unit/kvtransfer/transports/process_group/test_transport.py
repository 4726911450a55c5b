from __future__ import annotations

import contextlib
import gc
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch
from torch.distributed.distributed_c10d import Work

from baton.errors import (
    BatonError,
    ChecksumMismatch,
    ConfigError,
    DeadlineExceeded,
    HandoffError,
    WorkerFailed,
)
from kvtransfer.memory.memory import BlockMemory
from kvtransfer.transports.encryption import NONCE_BYTES, OVERHEAD, Decryptor, wire_bytes
from kvtransfer.transports.process_group import rendezvous
from kvtransfer.transports.process_group import transport as transport_module
from kvtransfer.transports.process_group.link import BUFFERS, GroupReceiveLink, GroupSendLink
from kvtransfer.transports.process_group.process_pair import GlooPair
from kvtransfer.transports.process_group.transport import GroupTransport
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts, Peer
from tests.support.kvtransfer.array_memory import ArrayMemory

BLOCK = 4096
BLOCKS = 32
STAGING = BUFFERS * 4 * BLOCK
"""Messages of four blocks."""
PEER = Peer("incarnation", "127.0.0.1:1")
LONG_S = 60.0
FORM_S = 0.3


def transport(memory: ArrayMemory) -> GroupTransport:
    made = GroupTransport("gloo", staging_bytes=STAGING)
    made.register(memory)
    return made


@dataclass
class Ends:
    """Two transports in one process, and one link from the first to the second."""

    source: ArrayMemory
    target: ArrayMemory
    writer: GroupTransport
    receiver: GroupTransport
    send: GroupSendLink
    receive: GroupReceiveLink

    def link(self) -> None:
        self.receive, answer = self.receiver.accept(PEER, self.writer.offer())
        self.send = self.writer.connect(PEER, answer)

    def move(self, number: int, batch: AnnouncedBatch, packed: Packed) -> tuple[Transfer, Transfer]:
        landed = self.receive.receive(batch, LONG_S)
        return self.send.send(number, packed, LONG_S), landed

    def pack(self, number: int, blocks: list[int], to: list[int]) -> tuple[AnnouncedBatch, Packed]:
        parts = Parts(tuple(blocks), 64, BLOCK - 128)
        packed = self.send.pack(number, parts)
        target = replace(parts, blocks=tuple(to))
        return AnnouncedBatch(number, parts, target, packed.checksums), packed

    def has(self, blocks: list[int], to: list[int]) -> bool:
        inside = slice(64, BLOCK - 64)
        return np.array_equal(self.source.array[blocks, inside], self.target.array[to, inside])


@pytest.fixture
def ends() -> Iterator[Ends]:
    before = set(threading.enumerate())
    source, target = ArrayMemory(BLOCKS, BLOCK, seed=1), ArrayMemory(BLOCKS, BLOCK)
    writer, receiver = transport(source), transport(target)
    receive, answer = receiver.accept(PEER, writer.offer())
    send = writer.connect(PEER, answer)
    with contextlib.closing(writer), contextlib.closing(receiver):
        yield Ends(source, target, writer, receiver, send, receive)
    assert set(threading.enumerate()) <= before


def error_of(transfer: Transfer) -> type[BaseException] | None:
    """What it ended with."""
    try:
        transfer.wait(LONG_S)
    except (BatonError, CancelledError) as error:
        return type(error)
    return None


def eventually(holds: Callable[[], bool]) -> bool:
    until = time.monotonic() + LONG_S
    while not holds() and time.monotonic() < until:
        time.sleep(0.01)
    return holds()


Decrypt = Callable[[Decryptor, BlockMemory, AnnouncedBatch, int, memoryview], None]


def damaging(decrypt: Decrypt, part: int) -> Decrypt:
    """Decrypts; a bit of part number ``part`` has changed on its way."""

    def changed(
        own: Decryptor, memory: BlockMemory, batch: AnnouncedBatch, index: int, data: memoryview
    ) -> None:
        if index == part:
            data[len(data) // 2] ^= 1
        decrypt(own, memory, batch, index, data)

    return changed


def form(ends: Ends) -> None:
    """Move a batch, so that the process group is there."""
    for transfer in ends.move(1, *ends.pack(1, [0], [0])):
        transfer.wait(LONG_S)


def sockets() -> int:
    found = 0
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(OSError):
            found += entry.readlink().name.startswith("socket:")
    return found


def listening() -> set[tuple[str, int]]:
    return {
        (found.laddr.ip, found.laddr.port)
        for found in psutil.Process().net_connections("tcp")
        if found.status == psutil.CONN_LISTEN
    }


def test_parts_land_in_their_blocks(ends: Ends) -> None:
    blocks, to = [5, 3, 8], [0, 9, 4]
    sent, landed = ends.move(1, *ends.pack(1, blocks, to))
    assert error_of(sent) is None
    assert error_of(landed) is None
    assert ends.has(blocks, to)
    assert not ends.target.array[:, :64].any()
    assert not ends.target.array[:, -64:].any()
    others = [block for block in range(BLOCKS) if block not in to]
    assert not ends.target.array[others].any()


def test_batches_land_in_order(ends: Ends) -> None:
    """More batches than buffers, some of them larger than a message."""
    batches = [ends.pack(n, list(range(n + 1)), [0] * n + [31 - n]) for n in range(12)]
    order: list[Transfer] = []
    landings, over = [], []
    for number, (batch, packed) in enumerate(batches):
        sent, landed = ends.move(number, batch, packed)
        landed.when_over(order.append)
        landings.append(landed)
        over += [sent, landed]
    assert [error_of(transfer) for transfer in over] == [None] * len(over)
    assert order == landings
    for number in range(12):
        assert ends.has([number], [31 - number])


def test_the_receiver_may_be_notified_late(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer's time to form a group begins when the receiver is there."""
    monkeypatch.setattr(rendezvous, "FORM_S", FORM_S)
    batch, packed = ends.pack(1, [1, 2], [1, 2])
    sent = ends.send.send(1, packed, LONG_S)
    with pytest.raises(TimeoutError):
        sent.wait(2 * FORM_S)
    landed = ends.receive.receive(batch, LONG_S)
    assert error_of(sent) is None
    assert error_of(landed) is None
    assert ends.has([1, 2], [1, 2])


def test_a_batch_of_nothing_is_done(ends: Ends) -> None:
    sent, landed = ends.move(1, *ends.pack(1, [], []))
    assert sent.poll()
    assert landed.poll()


def test_a_damaged_part_is_refused_and_the_next_batch_lands(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch, packed = ends.pack(1, list(range(9)), list(range(9)))
    with monkeypatch.context() as damaged:
        damaged.setattr(Decryptor, "decrypt", damaging(Decryptor.decrypt, part=1))
        sent, landed = ends.move(1, batch, packed)
        assert error_of(landed) is ChecksumMismatch
    next_sent, next_landed = ends.move(2, *ends.pack(2, [20], [20]))
    assert error_of(landed) is ChecksumMismatch
    assert error_of(sent) is None
    assert error_of(next_sent) is None
    assert error_of(next_landed) is None
    assert not ends.target.array[2:9].any()
    assert ends.has([20], [20])


@pytest.mark.parametrize("side", ["receiver", "writer"])
def test_a_cancelled_batch_is_let_pass(ends: Ends, side: str) -> None:
    batch, packed = ends.pack(1, [1], [1])
    landed = ends.receive.receive(batch, LONG_S)
    if side == "receiver":
        landed.cancel()
        sent = ends.send.send(1, packed, LONG_S)
    else:
        sent = ends.send.send(1, packed, LONG_S)
        sent.cancel()  # or it was quicker
    last_sent, last_landed = ends.move(2, *ends.pack(2, [2], [2]))
    assert error_of(last_landed) is None
    assert error_of(last_sent) is None
    if side == "receiver":
        assert error_of(landed) is CancelledError
        assert error_of(sent) is None
        assert not ends.target.array[1].any()
    else:
        assert error_of(landed) is None


def test_what_was_packed_and_forgotten_leaves_room(ends: Ends) -> None:
    """Packing never waits, and staging does not grow."""
    for _ in range(3 * BUFFERS):
        ends.pack(1, [1], [1])
    gc.collect()
    kept = [ends.pack(n, [n], [n]) for n in range(2 * BUFFERS)]
    staged = [packed for _, packed in kept if packed.payload is not ends.source]
    assert 0 < len(staged) < BUFFERS
    for number, (batch, packed) in enumerate(kept):
        sent, landed = ends.move(number, batch, packed)
        assert error_of(landed) is None
        assert error_of(sent) is None
    assert ends.has(list(range(2 * BUFFERS)), list(range(2 * BUFFERS)))
    _, packed = ends.pack(99, [0], [0])
    assert packed.payload is not None  # although the others are held


def test_a_sender_that_does_not_come_is_noticed(ends: Ends) -> None:
    """At the deadline, before a group is formed and after."""
    batch, _ = ends.pack(2, [1], [1])
    assert error_of(ends.receive.receive(batch, 0.3)) is DeadlineExceeded
    ends.link()
    form(ends)
    late = ends.receive.receive(batch, 0.3)
    after = ends.receive.receive(replace(batch, number=3), LONG_S)
    assert error_of(late) is DeadlineExceeded
    assert error_of(after) is WorkerFailed
    assert error_of(ends.receive.receive(batch, LONG_S)) is WorkerFailed
    assert not ends.target.array[1].any()


def test_a_receiver_that_does_not_come_is_noticed(ends: Ends) -> None:
    _, packed = ends.pack(2, [1], [1])
    assert error_of(ends.send.send(2, packed, 0.3)) is DeadlineExceeded
    ends.link()
    form(ends)
    _, packed = ends.pack(2, [1], [1])
    assert error_of(ends.send.send(2, packed, 0.3)) is DeadlineExceeded


def test_a_shorter_deadline_behind_a_longer_one_counts(ends: Ends) -> None:
    batch, _ = ends.pack(1, [1], [1])
    first = ends.receive.receive(batch, LONG_S)
    second = ends.receive.receive(replace(batch, number=2), 0.3)
    assert error_of(second) is DeadlineExceeded
    assert error_of(first) is WorkerFailed


@pytest.mark.parametrize("formed", [False, True])
@pytest.mark.parametrize("side", ["receiver", "writer"])
def test_close_ends_calls_in_flight(ends: Ends, side: str, formed: bool) -> None:
    if formed:
        form(ends)
    batch, _ = ends.pack(2, [1], [1])
    landed = ends.receive.receive(batch, LONG_S)
    closed = ends.receive if side == "receiver" else ends.send
    closed.close()
    closed.close()
    if side == "receiver" or formed:
        assert error_of(landed) is WorkerFailed
    if formed:
        assert eventually(lambda: ends.receive.is_broken and ends.send.is_broken)
        _, packed = ends.pack(3, [1], [1])
        assert error_of(ends.send.send(3, packed, LONG_S)) is WorkerFailed


def test_nothing_is_written_after_a_close(ends: Ends) -> None:
    """A transfer that is being written ends when the writing does, and not before."""
    form(ends)
    ends.target.writes.acquire(timeout=LONG_S)
    ends.target.may_write.clear()
    _, landed = ends.move(2, *ends.pack(2, [1, 2, 3], [1, 2, 3]))
    assert ends.target.writes.acquire(timeout=LONG_S)
    landed.cancel()
    assert not landed.poll()
    ends.receive.close()
    assert not landed.poll()
    ends.target.may_write.set()
    assert error_of(landed) is WorkerFailed
    written = ends.target.array.copy()
    ends.receive.join()
    assert ends.receive.is_over
    assert np.array_equal(written, ends.target.array)
    assert not ends.target.array[2:4].any()


def test_a_pair_is_formed_again_by_a_new_link(ends: Ends) -> None:
    for number in range(1, 4):
        ends.target.array[:] = 0
        form(ends)
        assert ends.has([0], [0])
        (ends.send if number % 2 else ends.receive).close()
        ends.link()


def test_a_closed_pair_leaves_nothing(ends: Ends) -> None:
    ends.writer.close()
    ends.receiver.close()
    before = sockets()
    for _ in range(3):
        ends.writer.register(ends.source)
        ends.receiver.register(ends.target)
        ends.link()
        form(ends)
        assert sockets() > before
        ends.send.close()
        ends.receive.close()
    assert eventually(lambda: sockets() <= before)  # another test's may go


def test_links_do_not_wait_for_each_other(ends: Ends) -> None:
    stuck, _ = ends.receiver.accept(PEER, ends.writer.offer())
    batch, _ = ends.pack(1, [9], [9])
    waiting = stuck.receive(batch, LONG_S)
    form(ends)
    assert not waiting.poll()


def test_a_stranger_is_rejected(ends: Ends) -> None:
    ends.receive, answer = ends.receiver.accept(PEER, ends.writer.offer())
    ends.send = ends.writer.connect(PEER, answer)
    port = json.loads(answer)["port"]
    batch, packed = ends.pack(1, [1], [1])
    landed = ends.receive.receive(batch, LONG_S)
    with socket.create_connection(("127.0.0.1", port)) as silent:
        with socket.create_connection(("127.0.0.1", port)) as stranger:
            stranger.sendall(b"x" * 32)
            assert error_of(ends.send.send(1, packed, LONG_S)) is None
        assert error_of(landed) is None
        silent.close()


@pytest.mark.parametrize("offer", [b"", b"\xff", b"[]", b"{}", b'{"host": 1}'])
def test_a_foreign_offer_or_answer_is_refused(ends: Ends, offer: bytes) -> None:
    with pytest.raises(HandoffError, match=PEER.incarnation):
        ends.receiver.accept(PEER, offer)
    with pytest.raises(HandoffError, match=PEER.incarnation):
        ends.writer.connect(PEER, offer)


def test_fields_of_other_types_are_refused(ends: Ends) -> None:
    offer = json.loads(ends.writer.offer())
    for name in offer:
        with pytest.raises(HandoffError):
            ends.receiver.accept(PEER, json.dumps(offer | {name: 1.5}).encode())
    with pytest.raises(HandoffError, match="no staging"):
        ends.receiver.accept(PEER, json.dumps(offer | {"encrypted_bytes": 0}).encode())


def test_loopback_reaches_no_other_host(ends: Ends) -> None:
    offer = json.loads(ends.writer.offer()) | {"machine": "another"}
    with pytest.raises(HandoffError, match=r"127\.0\.0\.1 is reachable only on its own host"):
        ends.receiver.accept(PEER, json.dumps(offer).encode())


def test_the_smaller_staging_counts(ends: Ends) -> None:
    small = GroupTransport("gloo", staging_bytes=BUFFERS * wire_bytes(BLOCK))
    with contextlib.closing(small):
        small.register(ends.target)
        ends.receive, answer = small.accept(PEER, ends.writer.offer())
        ends.send = ends.writer.connect(PEER, answer)
        sent, landed = ends.move(1, *ends.pack(1, list(range(6)), list(range(6))))
        assert error_of(sent) is None
        assert error_of(landed) is None
        assert ends.has(list(range(6)), list(range(6)))
    big = json.loads(answer) | {"encrypted_bytes": STAGING}
    with pytest.raises(HandoffError, match="larger messages"):
        ends.writer.connect(PEER, json.dumps(big).encode())


def test_staging_must_hold_blocks() -> None:
    made = GroupTransport("gloo", staging_bytes=BUFFERS * wire_bytes(BLOCK) - 1)
    with pytest.raises(ConfigError, match=str(BLOCK)):
        made.register(ArrayMemory(1, BLOCK))


def test_nccl_says_what_it_lacks(monkeypatch: pytest.MonkeyPatch) -> None:
    made = GroupTransport("nccl")
    assert made.name == "nccl"
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: False)
    with pytest.raises(ConfigError, match="no NCCL"):
        made.register(ArrayMemory(1, BLOCK))
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ConfigError, match="GPU"):
        made.register(ArrayMemory(1, BLOCK))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match="on cpu"):
        made.register(ArrayMemory(1, BLOCK))


def test_everything_listens_on_its_host_alone(ends: Ends) -> None:
    before = listening()
    form(ends)
    fresh = listening() - before
    assert fresh
    assert {address for address, _ in fresh} == {"127.0.0.1"}


def test_an_older_worker_is_refused_with_what_to_do(ends: Ends) -> None:
    """In both directions; its messages have ``message_bytes``."""

    def older(told: bytes) -> bytes:
        fields = json.loads(told)
        fields["message_bytes"] = fields.pop("encrypted_bytes")
        fields.pop("key", None)
        return json.dumps(fields).encode()

    offer = ends.writer.offer()
    _, answer = ends.receiver.accept(PEER, offer)
    words = r"incarnation sends KV blocks unencrypted.*upgrade"
    with pytest.raises(HandoffError, match=words):
        ends.receiver.accept(PEER, older(offer))
    with pytest.raises(HandoffError, match=words):
        ends.writer.connect(PEER, older(answer))
    assert "message_bytes" not in json.loads(offer), "which an older one requires"


@pytest.mark.parametrize("key", ["", "00", "00" * 17, "zz" * 16])
def test_an_answer_without_a_key_is_refused(ends: Ends, key: str) -> None:
    _, answer = ends.receiver.accept(PEER, ends.writer.offer())
    told = json.loads(answer) | {"key": key}
    with pytest.raises(HandoffError, match="no key of 16 bytes"):
        ends.writer.connect(PEER, json.dumps(told).encode())


# Those who read and change bytes on their way

Message = npt.NDArray[np.uint8]
"""The parts of a message as they are on the wire, uint8 [parts, bytes]."""
Attack = Callable[[Message, Message], None]
"""Changes a message; the second one is an earlier one of the same pair."""


@dataclass
class Wire:
    """What someone on the network sees, and does to all messages but the first."""

    attack: Attack | None = None
    seen: list[Message] = field(default_factory=list)


def flip(message: Message, earlier: Message) -> None:
    message[0, NONCE_BYTES + 100] ^= 1


def flip_nonce(message: Message, earlier: Message) -> None:
    message[0, NONCE_BYTES - 1] ^= 1


def flip_tag(message: Message, earlier: Message) -> None:
    message[0, -1] ^= 1


def truncate(message: Message, earlier: Message) -> None:
    message[-1, -200:] = 0


def swap(message: Message, earlier: Message) -> None:
    message[:2] = message[1::-1].copy()


def replay(message: Message, earlier: Message) -> None:
    message[:1] = earlier[:1]


ATTACKS = (flip, flip_nonce, flip_tag, truncate, swap, replay)


@pytest.fixture
def wire(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> Wire:
    wire = Wire()

    class Attacked(GlooPair):
        def send(self, data: torch.Tensor, tag: int) -> Work:
            message = data.numpy().reshape(-1, wire_bytes(BLOCK - 128))
            wire.seen.append(message.copy())
            if wire.attack is not None and len(wire.seen) > 1:
                wire.attack(message, wire.seen[0])
            return super().send(data, tag)

    monkeypatch.setattr(transport_module, "GlooPair", Attacked)
    ends.link()
    return wire


@pytest.mark.parametrize("is_staged", [True, False])
@pytest.mark.parametrize("attack", [None, *ATTACKS])
def test_bytes_that_were_changed_on_their_way_are_refused(
    ends: Ends, wire: Wire, attack: Attack | None, is_staged: bool
) -> None:
    # Both batches are of the same blocks, so a replayed part differs by its batch alone.
    blocks = list(range(3 if is_staged else 9))
    for transfer in ends.move(1, *ends.pack(1, [0, 1, 2], [10, 11, 12])):
        transfer.wait(LONG_S)
    wire.attack = attack
    _, landed = ends.move(2, *ends.pack(2, blocks, blocks))
    assert error_of(landed) is (None if attack is None else ChecksumMismatch)
    # The link still serves.
    wire.attack = None
    assert error_of(ends.move(3, *ends.pack(3, [4], [4]))[1]) is None
    assert ends.has([4], [4])


def test_the_wire_shows_no_block(ends: Ends, wire: Wire) -> None:
    ends.source.array[:] = 7
    form(ends)
    (message,) = wire.seen
    body = message[0, NONCE_BYTES:]
    assert body.size == BLOCK - 128 + OVERHEAD - NONCE_BYTES
    assert np.bincount(body, minlength=256).max() < body.size // 16
