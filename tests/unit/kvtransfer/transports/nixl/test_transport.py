"""kvtransfer/transports/nixl/transport.py: two workers' transports in one process."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from concurrent.futures import CancelledError
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from baton.errors import ChecksumMismatch, HandoffError, WorkerFailed
from kvtransfer.memory.memory import HostMemory
from kvtransfer.transports.encryption import wire_bytes
from kvtransfer.transports.nixl.reader import SLOT_BYTES
from kvtransfer.transports.nixl.transport import NixlReceiveLink, NixlSendLink, NixlTransport
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Packed, Parts, Peer, Transport

pytest.importorskip("nixl", reason="the extra nixl is not installed")

PATIENCE_S = 30.0
BLOCKS, BLOCK_BYTES = 40, 1 << 20
WHOLE = (0, BLOCK_BYTES)


class Worker:
    """A worker's blocks and its transport."""

    def __init__(self, name: str, seed: int | None = None) -> None:
        self.blocks: npt.NDArray[np.uint8] = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        if seed is not None:
            self.blocks[:] = np.random.default_rng(seed).integers(
                0, 256, self.blocks.shape, dtype=np.uint8
            )
        self.transport = NixlTransport(name, staging_bytes=4 * SLOT_BYTES)
        self.transport.register(HostMemory(self.blocks))


class Pair:
    """A writer, a receiver, and the links between them."""

    def __init__(self) -> None:
        self.writer, self.receiver = Worker("writer", seed=1), Worker("receiver")
        self.number = 0
        self.kept: list[Packed] = []
        """As a pair does until they have landed."""
        self.send_link, self.receive_link = self.link()

    def link(self) -> tuple[NixlSendLink, NixlReceiveLink]:
        offer = self.writer.transport.offer()
        receive_link, answer = self.receiver.transport.accept(Peer("writer", ""), offer)
        return self.writer.transport.connect(Peer("receiver", ""), answer), receive_link

    def move(
        self, source: tuple[int, ...], target: tuple[int, ...], part: tuple[int, int] = WHOLE
    ) -> Transfer:
        return self.receive(self.pack(source, part), target)

    def pack(self, source: tuple[int, ...], part: tuple[int, int] = WHOLE) -> Packed:
        """Of the next batch."""
        self.number += 1
        return self.send_link.pack(self.number, Parts(source, *part))

    def receive(self, packed: Packed, target: tuple[int, ...]) -> Transfer:
        """Of the batch that was packed last."""
        self.send_link.send(self.number, packed, PATIENCE_S).wait(PATIENCE_S)
        return self.receive_link.receive(self.announced(packed, target), PATIENCE_S)

    def announced(self, packed: Packed, target: tuple[int, ...]) -> AnnouncedBatch:
        """As its receiver learns of it."""
        parts, region = packed.parts, packed.region
        assert region is not None
        there = Parts(target, parts.offset, parts.length)
        self.kept.append(packed)
        return AnnouncedBatch(self.number, parts, there, (), region.at)

    def close(self) -> None:
        self.receiver.transport.close()
        self.writer.transport.close()


@contextmanager
def open_pair() -> Iterator[Pair]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,sm,self")
        patch.setenv("UCX_NET_DEVICES", "lo")
        pair = Pair()
    yield pair
    pair.close()


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = threading.active_count()
    with open_pair() as pair:
        yield pair
    assert threading.active_count() == before


@pytest.fixture(scope="module")
def lasting_pair() -> Iterator[Pair]:
    """For tests after which it is as it was."""
    with open_pair() as pair:
        yield pair


def test_it_is_a_transport(pair: Pair) -> None:
    transport: Transport = pair.writer.transport
    assert transport.name == "nixl"


def test_blocks_arrive_where_they_belong_and_nowhere_else(pair: Pair) -> None:
    # More than both slots of a writer hold.
    source = (*range(0, 40, 2), 1, 3)
    target = tuple(39 - block for block in source)
    pair.move(source, target).wait(PATIENCE_S)
    expected = np.zeros_like(pair.receiver.blocks)
    expected[list(target)] = pair.writer.blocks[list(source)]
    np.testing.assert_array_equal(pair.receiver.blocks, expected)


@pytest.mark.parametrize("part", [(0, 8), (64, 4097), (BLOCK_BYTES - 3, 3)])
def test_a_part_of_some_blocks(pair: Pair, part: tuple[int, int]) -> None:
    pair.move((5, 6), (0, 9), part).wait(PATIENCE_S)
    expected = np.zeros_like(pair.receiver.blocks)
    inside = slice(part[0], sum(part))
    expected[[0, 9], inside] = pair.writer.blocks[[5, 6], inside]
    np.testing.assert_array_equal(pair.receiver.blocks, expected)


def test_many_batches_at_once(pair: Pair) -> None:
    transfers = [pair.move((block,), (block,)) for block in range(BLOCKS // 2)]
    for transfer in transfers:
        transfer.wait(PATIENCE_S)
    half = slice(BLOCKS // 2)
    np.testing.assert_array_equal(pair.receiver.blocks[half], pair.writer.blocks[half])


def test_no_blocks_at_all(pair: Pair) -> None:
    pair.move((), ()).wait(PATIENCE_S)


def test_bytes_that_changed_on_their_way(pair: Pair) -> None:
    packed = pair.pack((0, 1))
    assert packed.region is not None
    packed.region.view[-20] ^= 1
    with pytest.raises(ChecksumMismatch):
        pair.receive(packed, (0, 1)).wait(PATIENCE_S)
    # The link goes on.
    pair.move((2,), (2,)).wait(PATIENCE_S)


def test_another_batch_at_its_place(pair: Pair) -> None:
    """An earlier one of the same blocks, and one of other blocks."""
    first = pair.pack((0, 1))
    second = pair.pack((0, 1))
    assert first.region is not None
    assert second.region is not None
    second.region.view[:] = first.region.view
    with pytest.raises(ChecksumMismatch):
        pair.receive(second, (0, 1)).wait(PATIENCE_S)
    third = pair.pack((4, 5))
    assert third.region is not None
    half = len(third.region.view) // 2
    swapped = bytes(third.region.view[half:]) + bytes(third.region.view[:half])
    third.region.view[:] = swapped
    with pytest.raises(ChecksumMismatch):
        pair.receive(third, (4, 5)).wait(PATIENCE_S)


def test_peers_may_read_no_block(pair: Pair) -> None:
    pair.writer.blocks[0] = 7
    packed = pair.pack((0,))
    assert packed.region is not None
    assert bytes(64 * [7]) not in bytes(packed.region.view)
    offer = json.loads(pair.writer.transport.offer())
    first, blocks = offer["staging_address"], pair.writer.blocks
    last = first + offer["staging_bytes"]
    assert last <= blocks.ctypes.data or first >= blocks.ctypes.data + blocks.nbytes


def test_room_is_awaited_until_the_link_closes(pair: Pair) -> None:
    held = [pair.pack(tuple(range(7))) for _ in range(4)]
    threading.Timer(0.05, pair.send_link.close).start()
    with pytest.raises(WorkerFailed, match="closed"):
        pair.pack(tuple(range(7)))
    del held


def test_what_is_not_wanted_is_not_read(pair: Pair) -> None:
    batch = pair.announced(pair.pack((0,)), (0,))
    with pytest.raises(CancelledError):
        pair.receive_link.receive(batch, PATIENCE_S, wanted=False).poll()
    pair.move((1,), (1,)).wait(PATIENCE_S)
    assert not pair.receiver.blocks[0].any()


def test_a_link_that_was_closed_and_the_next_of_the_same_pair(pair: Pair) -> None:
    pair.move((0,), (0,)).wait(PATIENCE_S)
    pair.receive_link.close()
    pair.receive_link.close()
    with pytest.raises(WorkerFailed, match="closed"):
        pair.move((1,), (1,)).wait(PATIENCE_S)
    packed = pair.pack((1,))
    pair.send_link.close()
    with pytest.raises(WorkerFailed, match="closed"):
        pair.send_link.send(9, packed, PATIENCE_S).wait(PATIENCE_S)

    pair.send_link, pair.receive_link = pair.link()
    pair.move((2,), (2,)).wait(PATIENCE_S)
    np.testing.assert_array_equal(pair.receiver.blocks[2], pair.writer.blocks[2])
    assert not pair.receiver.blocks[1].any()


def test_both_directions(pair: Pair) -> None:
    """Every worker both writes and receives, with one agent."""
    pair.move((0,), (0,)).wait(PATIENCE_S)
    offer = pair.receiver.transport.offer()
    back, answer = pair.writer.transport.accept(Peer("receiver", ""), offer)
    sender = pair.receiver.transport.connect(Peer("writer", ""), answer)
    packed = sender.pack(1, Parts((0,), *WHOLE))
    assert packed.region is not None
    batch = AnnouncedBatch(1, packed.parts, Parts((39,), *WHOLE), (), packed.region.at)
    back.receive(batch, PATIENCE_S).wait(PATIENCE_S)
    np.testing.assert_array_equal(pair.writer.blocks[39], pair.writer.blocks[0])


def test_a_writer_that_has_closed(pair: Pair) -> None:
    pair.move((0,), (0,)).wait(PATIENCE_S)
    batch = pair.announced(pair.pack((1,)), (1,))
    pair.writer.transport.close()
    pair.writer.transport.close()
    with pytest.raises(WorkerFailed):
        pair.receive_link.receive(batch, PATIENCE_S).wait(PATIENCE_S)
    assert not pair.receiver.blocks[1].any()


def edited(offer: bytes, **changes: Any) -> bytes:
    return json.dumps(json.loads(offer) | changes).encode()


@pytest.mark.parametrize(
    "changes",
    [
        {"staging_address": 0},
        {"staging_address": "somewhere"},
        {"staging_address": (1 << 64) - 1},
        {"staging_bytes": 0},
        {"staging_bytes": -1},
        {"staging_bytes": None},
        {"metadata": "not base64"},
    ],
)
def test_an_offer_that_makes_no_sense_is_refused(
    lasting_pair: Pair, changes: dict[str, Any]
) -> None:
    with pytest.raises(HandoffError, match="offer of transport nixl"):
        lasting_pair.receiver.transport.accept(
            Peer("writer", ""), edited(lasting_pair.writer.transport.offer(), **changes)
        )


@pytest.mark.parametrize("offer", [b"", b"{}", b"[]", b"\xff"])
def test_an_offer_that_is_none_is_refused(lasting_pair: Pair, offer: bytes) -> None:
    with pytest.raises(HandoffError, match="cannot be read"):
        lasting_pair.receiver.transport.accept(Peer("writer", ""), offer)


def test_an_older_worker_is_refused_with_what_to_do(lasting_pair: Pair) -> None:
    offer = lasting_pair.writer.transport.offer()
    older = edited(offer, address=1, blocks=1, block_bytes=64, device="cpu")
    with pytest.raises(HandoffError, match=r"unencrypted.*upgrade"):
        lasting_pair.receiver.transport.accept(Peer("writer", ""), older)
    assert not {"address", "blocks", "block_bytes"} & json.loads(offer).keys(), "it needs these"


@pytest.mark.parametrize("answer", [b"", b"tcp://", b"{}", b"[]", b'{"key": 1}', b'{"key": "00"}'])
def test_an_answer_without_a_key_is_refused(lasting_pair: Pair, answer: bytes) -> None:
    with pytest.raises(HandoffError, match=r"no answer|no key"):
        lasting_pair.writer.transport.connect(Peer("receiver", ""), answer)


GOOD = AnnouncedBatch(1, Parts((0, 1), 64, 128), Parts((2, 3), 64, 128), ())


@pytest.mark.parametrize(
    "batch",
    [
        dataclasses.replace(GOOD, staged_at=-1),
        dataclasses.replace(GOOD, staged_at=4 * SLOT_BYTES - 2 * wire_bytes(128) + 1),
        dataclasses.replace(GOOD, source=Parts((0, 1), 64, SLOT_BYTES)),
        dataclasses.replace(GOOD, source=Parts((0, 1), 64, -128)),
        dataclasses.replace(GOOD, source=Parts((0, 1), 64, 0)),
        dataclasses.replace(GOOD, source=Parts((0, 1), 128, 128)),
        dataclasses.replace(GOOD, source=Parts((0, 1, 2), 64, 128)),
        dataclasses.replace(GOOD, target=Parts((2,), 64, 128)),
        dataclasses.replace(GOOD, target=Parts((2, BLOCKS), 64, 128)),
    ],
)
def test_a_batch_that_fits_nothing_is_refused(lasting_pair: Pair, batch: AnnouncedBatch) -> None:
    with pytest.raises(HandoffError):
        lasting_pair.receive_link.receive(batch, PATIENCE_S).wait(PATIENCE_S)
    lasting_pair.move((4,), (4,)).wait(PATIENCE_S)


def test_an_offer_of_memory_that_is_not_there_fails_the_batch(lasting_pair: Pair) -> None:
    offer = lasting_pair.writer.transport.offer()
    told = json.loads(offer)
    offer = edited(offer, staging_address=told["staging_address"] + told["staging_bytes"])
    link, _ = lasting_pair.receiver.transport.accept(Peer("writer", ""), offer)
    with pytest.raises(HandoffError):
        link.receive(GOOD, PATIENCE_S).wait(PATIENCE_S)
