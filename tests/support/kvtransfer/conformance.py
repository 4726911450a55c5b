"""What every transport does. A test module of one has a class that inherits these cases:

    class TestShm(TransportConformance):
        transport = "shm"

Two ends in one process, and a writer in a process of its own where it is stopped or killed.
"""

from __future__ import annotations

import gc
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest

from baton.errors import BatonError, ChecksumMismatch, HandoffError, WorkerFailed
from kvtransfer.transports.encryption import wire_bytes
from kvtransfer.transports.staging import Region
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import (
    AnnouncedBatch,
    Packed,
    Parts,
    Peer,
    ReceiveLink,
    SendLink,
)
from tests.support.kvtransfer.ends import BLOCK_BYTES, BLOCKS, DEADLINE_S, Bytes, End, some_blocks
from tests.support.kvtransfer.writer_process import WriterProcess

PATTERN = 0xA5


class Pair:
    """One direction between two ends."""

    def __init__(self, writer: End, receiver: End, name: str = "pair") -> None:
        transports = writer.transport, receiver.transport
        self.writer, self.receiver = writer, receiver
        offer = transports[0].offer()
        self.receive: ReceiveLink
        self.send: SendLink
        self.receive, answer = transports[1].accept(Peer(f"{name}-writer", ""), offer)
        self.send = transports[0].connect(Peer(f"{name}-receiver", ""), answer)
        self._number = 0
        self._packed = 0
        self._regions: list[Region | None] = []
        """What receivers may still read; a writer's pair keeps it until it has landed."""

    def pack(self, sources: Sequence[int], offset: int = 0, length: int = BLOCK_BYTES) -> Packed:
        """As a transfer thread of the writer does."""
        packed = self.send.pack(self._packed, Parts(tuple(sources), offset, length))
        self._packed += 1
        self._regions.append(packed.region)
        return packed

    def announced(
        self, packed: Packed, targets: Sequence[int], *, wanted: bool = True, damaged: bool = False
    ) -> tuple[AnnouncedBatch, Transfer]:
        """Tell the receiver of a batch; ``damaged``: its last part's checksum is another, or what
        is encrypted changes on its way."""
        parts, checksums = packed.parts, list(packed.checksums)
        if damaged and checksums:
            checksums[-1] ^= 1 << 40
        elif damaged:
            wire = packed.payload.buffer.view if packed.region is None else packed.region.view
            wire[wire_bytes(parts.length) * len(parts.blocks) - 1] ^= 1
        target = Parts(tuple(targets) if wanted else (), parts.offset, parts.length)
        staged_at = 0 if packed.region is None else packed.region.at
        batch = AnnouncedBatch(self._number, parts, target, tuple(checksums), staged_at)
        self._number += 1
        return batch, self.receive.receive(batch, DEADLINE_S, wanted=wanted)

    def move(
        self,
        sources: Sequence[int],
        targets: Sequence[int],
        offset: int = 0,
        length: int = BLOCK_BYTES,
    ) -> None:
        """Bring parts over, to the end, in batches of the size that suits the transport."""
        step = self.writer.transport.batch_bytes // length
        moving = []
        for at in range(0, len(sources), step):
            packed = self.pack(sources[at : at + step], offset, length)
            batch, transfer = self.announced(packed, targets[at : at + step])
            moving += [transfer, self.send.send(batch.number, packed, DEADLINE_S)]
        for transfer in moving:
            transfer.wait(DEADLINE_S)

    def close(self) -> None:
        """Both ends."""
        self.send.close()
        self.receive.close()


def until(condition: Callable[[], object]) -> None:
    """Wait for a condition that no event tells of."""
    give_up = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < give_up, "it did not come about"
        time.sleep(0.01)


def ended(transfer: Transfer) -> BaseException | None:
    """Wait for its end; what it failed with."""
    try:
        transfer.wait(DEADLINE_S)
    except TimeoutError:
        raise
    except (BatonError, CancelledError) as error:
        return error
    return None


def held() -> tuple[int, int, int]:
    """Threads, sockets, and maps of pools that this process has."""
    gc.collect()
    sockets = 0
    for link in Path("/proc/self/fd").iterdir():
        try:
            sockets += str(link.readlink()).startswith("socket:")
        except FileNotFoundError:
            continue
    maps = Path("/proc/self/maps").read_text().count("memfd:baton-kv")
    return threading.active_count(), sockets, maps


class TransportConformance:
    """See the module's text."""

    transport: str
    """Its name in ``ends.MAKERS``."""

    @pytest.fixture
    def world(self) -> Iterator[ExitStack]:
        """Ends what a test has made."""
        with ExitStack() as stack:
            yield stack

    @pytest.fixture
    def ends(self, world: ExitStack) -> tuple[End, End]:
        """A writer and a receiver."""
        return self.make_end(world, 1), self.make_end(world, 2)

    @pytest.fixture
    def pair(self, ends: tuple[End, End], world: ExitStack) -> Pair:
        """From the writer to the receiver."""
        return self.make_pair(world, *ends)

    def make_end(self, world: ExitStack, seed: int) -> End:
        """See ``End``."""
        end = End(self.transport, seed)
        world.callback(end.close)
        return end

    def make_pair(self, world: ExitStack, writer: End, receiver: End, name: str = "pair") -> Pair:
        """See ``Pair``."""
        pair = Pair(writer, receiver, name)
        world.callback(pair.close)
        return pair

    def make_process(
        self, world: ExitStack, receiver: End, seed: int = 1
    ) -> tuple[WriterProcess, ReceiveLink]:
        """A writer in a process of its own, and this process's end of the link."""
        writer = WriterProcess(self.transport, seed)
        world.callback(writer.close)
        link, answer = receiver.transport.accept(writer.peer, writer.offer)
        world.callback(link.close)
        writer.connect(answer)
        return writer, link

    # What arrives

    def test_what_it_says_of_itself(self, ends: tuple[End, End]) -> None:
        transport = ends[0].transport
        assert transport.name == self.transport
        assert transport.part_bytes >= 64
        assert transport.batch_bytes >= 64
        assert isinstance(transport.offer(), bytes)

    def test_one_block(self, pair: Pair) -> None:
        expected = pair.receiver.data.copy()
        expected[7] = pair.writer.data[3]
        pair.move([3], [7])
        assert np.array_equal(pair.receiver.data, expected)

    def test_many_scattered_blocks_and_nothing_else(self, pair: Pair) -> None:
        before, expected = pair.writer.data.copy(), pair.receiver.data.copy()
        order = np.random.default_rng(3)
        sources = order.permutation(BLOCKS)[:40].tolist()
        targets = order.permutation(BLOCKS)[:40].tolist()
        expected[targets] = pair.writer.data[sources]
        pair.move(sources, targets)
        assert np.array_equal(pair.receiver.data, expected)
        assert np.array_equal(pair.writer.data, before), "the writer's own blocks have changed"

    @pytest.mark.parametrize(
        ("offset", "length"),
        [(0, 64), (64, 4096), (BLOCK_BYTES - 192, 192), (32 << 10, 64 << 10), (8, 24), (5, 61)],
    )
    def test_a_slice_of_each_block(self, pair: Pair, offset: int, length: int) -> None:
        sources, targets = [4, 9, 2, 30], [0, 47, 11, 12]
        expected = pair.receiver.data.copy()
        part = slice(offset, offset + length)
        expected[targets, part] = pair.writer.data[sources, part]
        pair.move(sources, targets, offset, length)
        assert np.array_equal(pair.receiver.data, expected)

    def test_slices_make_a_block(self, pair: Pair) -> None:
        """As the layers of a prompt follow one another."""
        cuts = [0, 64, 30_000, 65_600, BLOCK_BYTES]
        for start, end in itertools.pairwise(cuts):
            pair.move([5, 6], [8, 9], start, end - start)
        assert np.array_equal(pair.receiver.data[8:10], pair.writer.data[5:7])

    def test_batches_back_to_back(self, pair: Pair) -> None:
        """All are announced and sent before any is awaited; they end one by one."""
        sources = [(number * 7) % BLOCKS for number in range(BLOCKS)]
        transfers = []
        for target, source in enumerate(sources):
            packed = self.packed_one(pair, source)
            batch, transfer = pair.announced(packed, [target])
            transfers += [transfer, pair.send.send(batch.number, packed, DEADLINE_S)]
        for transfer in transfers:
            transfer.wait(DEADLINE_S)
        assert np.array_equal(pair.receiver.data, pair.writer.data[sources])

    def packed_one(self, pair: Pair, source: int) -> Packed:
        """A batch of one block."""
        return pair.pack([source])

    def test_bytes_may_come_before_what_is_said_of_them(self, pair: Pair) -> None:
        """They go another way than the announcement, which may be the slower."""
        packed = pair.pack([1, 2])
        sent = pair.send.send(0, packed, DEADLINE_S)
        time.sleep(0.05)
        _, transfer = pair.announced(packed, [3, 4])
        for each in (transfer, sent):
            each.wait(DEADLINE_S)
        assert np.array_equal(pair.receiver.data[3:5], pair.writer.data[1:3])

    def test_both_directions_at_once(self, ends: tuple[End, End], world: ExitStack) -> None:
        there, back = (self.make_pair(world, *order) for order in (ends, ends[::-1]))
        expected = [end.data.copy() for end in ends]
        expected[1][24:] = ends[0].data[:24]
        expected[0][24:] = ends[1].data[:24]
        threads = [
            threading.Thread(target=pair.move, args=(range(24), range(24, 48)))
            for pair in (there, back)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
        for end, wanted in zip(ends, expected, strict=True):
            assert np.array_equal(end.data, wanted)

    def test_several_pairs_at_once(self, world: ExitStack) -> None:
        """Two writers to two receivers, and each pair keeps to its own."""
        writers = [self.make_end(world, seed) for seed in (1, 2)]
        receivers = [self.make_end(world, seed) for seed in (3, 4)]
        expected = [receiver.data.copy() for receiver in receivers]
        pairs, moves = [], []
        for (i, writer), (j, receiver) in itertools.product(
            enumerate(writers), enumerate(receivers)
        ):
            pairs.append(self.make_pair(world, writer, receiver, f"pair-{i}{j}"))
            sources, targets = range(j, j + 20), range(20 * i, 20 * i + 20)
            expected[j][targets] = writer.data[sources]
            moves.append((sources, targets))
        for at in (0, 10):
            for pair, (sources, targets) in zip(pairs, moves, strict=True):
                pair.move(sources[at : at + 10], targets[at : at + 10])
        for receiver, wanted in zip(receivers, expected, strict=True):
            assert np.array_equal(receiver.data, wanted)

    # What does not

    def test_a_damaged_part_fails_its_batch_and_no_other(self, pair: Pair) -> None:
        expected = pair.receiver.data.copy()
        expected[[0, 1]] = pair.writer.data[[0, 1]]
        packed = pair.pack([4, 5])
        batch, transfer = pair.announced(packed, [2, 3], damaged=True)
        sent = pair.send.send(batch.number, packed, DEADLINE_S)
        pair.move([0, 1], [0, 1])
        sent.wait(DEADLINE_S)
        with pytest.raises(ChecksumMismatch):
            transfer.wait(DEADLINE_S)
        expected[[2, 3]] = pair.receiver.data[[2, 3]]  # its own targets: whatever they hold
        assert np.array_equal(pair.receiver.data, expected)
        pair.receiver.data[[2, 3]] = PATTERN
        pair.move([0], [4])
        assert (pair.receiver.data[[2, 3]] == PATTERN).all()

    def test_bytes_that_changed_after_their_checksum_are_noticed(self, pair: Pair) -> None:
        packed = pair.pack([4, 5])
        packed_bytes = pair.writer.data[4:6].copy()
        pair.writer.data[5, 1234] ^= 1
        batch, transfer = pair.announced(packed, [2, 3])
        pair.send.send(batch.number, packed, DEADLINE_S)
        error = ended(transfer)
        if pair.writer.transport.copies_out:  # it keeps a copy of its own
            assert error is None
            assert np.array_equal(pair.receiver.data[2:4], packed_bytes)
        else:
            assert isinstance(error, ChecksumMismatch)

    def test_what_is_not_wanted_is_dropped_and_the_next_arrives(self, pair: Pair) -> None:
        expected = pair.receiver.data.copy()
        expected[10:12] = pair.writer.data[2:4]
        packed = pair.pack([0, 1, 6])
        batch, transfer = pair.announced(packed, [], wanted=False)
        with pytest.raises(CancelledError):
            transfer.poll()
        sent = pair.send.send(batch.number, packed, DEADLINE_S)
        pair.move([2, 3], [10, 11])
        sent.wait(DEADLINE_S)
        assert np.array_equal(pair.receiver.data, expected)

    def test_a_transfer_that_was_cancelled_before_its_bytes_came_is_never_written(
        self, pair: Pair
    ) -> None:
        expected = pair.receiver.data.copy()
        packed = pair.pack([0, 1])
        with pair.receiver.busy():
            batch, transfer = pair.announced(packed, [5, 6])
            transfer.cancel()
            with pytest.raises(CancelledError):
                transfer.poll()
        sent = pair.send.send(batch.number, packed, DEADLINE_S)
        pair.move([2], [7])
        sent.wait(DEADLINE_S)
        expected[7] = pair.writer.data[2]
        assert np.array_equal(pair.receiver.data, expected)

    def test_nothing_is_written_once_a_transfer_is_over(self, pair: Pair) -> None:
        """Whenever it was cancelled: what the new owner writes to the blocks stays."""
        everything = range(40)
        step = pair.writer.transport.batch_bytes // BLOCK_BYTES
        for attempt in range(8):
            packed = pair.pack(everything[:step])
            batch, transfer = pair.announced(packed, everything[:step])
            pair.send.send(batch.number, packed, DEADLINE_S)
            time.sleep(attempt * 0.0004)
            transfer.cancel()
            error = ended(transfer)
            assert error is None or isinstance(error, CancelledError)
            pair.receiver.data[:] = PATTERN
            pair.move([47], [47])
            assert (pair.receiver.data[:47] == PATTERN).all()

    def test_parts_that_the_writer_has_not_are_refused(self, pair: Pair) -> None:
        with pytest.raises(HandoffError):
            pair.pack([BLOCKS])
        with pytest.raises(HandoffError):
            pair.pack([0], 64, BLOCK_BYTES)

    # Endings

    def test_a_receiver_that_closes_its_link_fails_what_is_pending(self, pair: Pair) -> None:
        pair.move([0], [0])
        packed = pair.pack([1, 2])
        with pair.receiver.busy():
            _, transfer = pair.announced(packed, [1, 2])
            pair.receive.close()
            with pytest.raises(WorkerFailed):
                transfer.wait(DEADLINE_S)
        pair.receive.close()
        pair.receiver.data[:] = PATTERN
        # It is not awaited any more, and it must end all the same.
        ended(pair.send.send(1, packed, DEADLINE_S))
        with pytest.raises(WorkerFailed):
            pair.announced(packed, [1, 2])[1].wait(DEADLINE_S)
        pair.send.close()
        assert (pair.receiver.data == PATTERN).all()

    def test_a_writer_that_closes_its_link_leaves_nothing_half_done(self, pair: Pair) -> None:
        """One that has not been heard of yet may close unnoticed: its pair's stream tells."""
        pair.move([0], [0])
        packed = pair.pack([1, 2])
        batch, transfer = pair.announced(packed, [3, 4])
        pair.send.close()
        pair.send.close()
        with pytest.raises(WorkerFailed):
            pair.send.send(batch.number, packed, DEADLINE_S).wait(DEADLINE_S)
        if not isinstance(ended(transfer), WorkerFailed):
            assert np.array_equal(pair.receiver.data[3:5], pair.writer.data[1:3])

    @pytest.mark.parametrize("who", ["writer", "receiver"])
    def test_a_transport_that_closes_ends_its_links(self, pair: Pair, who: str) -> None:
        pair.move([0], [0])
        packed = pair.pack([1, 2])
        with pair.receiver.busy():
            _, transfer = pair.announced(packed, [1, 2])
            end = pair.writer if who == "writer" else pair.receiver
            end.transport.close()
            end.transport.close()
        error = ended(transfer)
        if who == "writer" and error is None:  # the receiver reads by itself, and noticed nothing
            assert np.array_equal(pair.receiver.data[1:3], pair.writer.data[1:3])
        else:
            assert isinstance(error, WorkerFailed)
        if who == "writer":
            late = pair.send.send(1, packed, DEADLINE_S)
        else:
            _, late = pair.announced(packed, [1, 2])
        assert isinstance(ended(late), WorkerFailed)

    def test_after_an_end_a_new_pair_works(self, ends: tuple[End, End], world: ExitStack) -> None:
        for target in range(4):
            pair = self.make_pair(world, *ends)
            pair.move([target + 10], [target])
            assert np.array_equal(ends[1].data[target], ends[0].data[target + 10])
            (pair.receive if target % 2 else pair.send).close()
        pair = self.make_pair(world, *ends)
        pair.move([1, 2], [5, 6])
        assert np.array_equal(ends[1].data[5:7], ends[0].data[1:3])

    def test_an_offer_or_answer_that_cannot_be_read_is_refused(self, ends: tuple[End, End]) -> None:
        """Where it needs one: never another error, nor a link that works."""
        writer, receiver = ends
        stranger = Peer("stranger", "")
        offer = writer.transport.offer()
        for wrong in (b"", b"\xff\x00", b"[]", b"{}", offer[:-1]):
            if wrong == offer:
                continue
            with suppress(HandoffError):
                receiver.transport.accept(stranger, wrong)[0].close()
        _, answer = receiver.transport.accept(stranger, offer)
        for wrong in (b"", b"\xff\x00", b"[]", b"{}", answer[:-1]):
            if wrong == answer:
                continue
            with suppress(HandoffError):
                writer.transport.connect(stranger, wrong).close()

    def test_closing_gives_everything_back(self) -> None:
        for _ in range(2):  # the first time something may be kept for all that follow
            before = held()
            with ExitStack() as world:
                ends = [self.make_end(world, seed) for seed in (1, 2)]
                for number in range(3):
                    self.make_pair(world, ends[0], ends[1], f"{number}").move([1, 2], [3, 4])
                idle = self.make_pair(world, ends[1], ends[0], "idle")
                assert idle
            del ends, idle
        until(lambda: all(now <= then for now, then in zip(held(), before, strict=True)))

    # Another process

    def test_a_writer_that_is_killed(self, ends: tuple[End, End], world: ExitStack) -> None:
        receiver = ends[1]
        writer, link = self.make_process(world, receiver)
        theirs = some_blocks(1)
        first = writer.pack(0, (1, 2), (3, 4))
        arrived = link.receive(first, DEADLINE_S)
        writer.send(0)
        assert writer.said() == ""
        arrived.wait(DEADLINE_S)
        assert np.array_equal(receiver.data[3:5], theirs[1:3])
        second = writer.pack(1, (5, 6), (7, 8))
        before = receiver.data.copy()
        writer.kill()
        error = ended(link.receive(second, DEADLINE_S))
        self.check_whole_or_failed(error, receiver.data, before, theirs)
        link.close()
        receiver.data[:] = PATTERN
        writer, link = self.make_process(world, receiver, seed=3)
        batch = writer.pack(0, (0,), (9,))
        arrived = link.receive(batch, DEADLINE_S)
        writer.send(0)
        arrived.wait(DEADLINE_S)
        assert np.array_equal(receiver.data[9], some_blocks(3)[0])
        assert (np.delete(receiver.data, 9, axis=0) == PATTERN).all()

    def check_whole_or_failed(
        self, error: BaseException | None, data: Bytes, before: Bytes, theirs: Bytes
    ) -> None:
        """Blocks 5, 6 of a writer that was killed have come to 7, 8, or it is said that not."""
        if error is None:
            before[7:9] = theirs[5:7]
        else:
            assert isinstance(error, WorkerFailed)
            before[7:9] = data[7:9]
        assert np.array_equal(data, before)

    def test_a_writer_that_is_killed_while_it_sends(self, world: ExitStack) -> None:
        receiver = self.make_end(world, 2)
        writer, link = self.make_process(world, receiver)
        theirs = some_blocks(1)
        step = min(24, receiver.transport.batch_bytes // BLOCK_BYTES)
        sources = tuple(range(24, 24 + step))
        batches = [writer.pack(number, sources, tuple(range(step))) for number in range(8)]
        untouched = receiver.data[step:].copy()
        transfers = [link.receive(batch, DEADLINE_S) for batch in batches]
        for batch in batches:
            writer.send(batch.number)
        transfers[1].wait(DEADLINE_S)
        writer.kill()
        errors = [ended(transfer) for transfer in transfers]
        assert all(error is None or isinstance(error, WorkerFailed) for error in errors)
        if errors[-1] is None:
            assert np.array_equal(receiver.data[:step], theirs[list(sources)])
        assert np.array_equal(receiver.data[step:], untouched)
        link.close()

    def test_a_writer_that_was_stopped_and_wakes_finds_nothing_to_spoil(
        self, world: ExitStack
    ) -> None:
        receiver = self.make_end(world, 2)
        writer, link = self.make_process(world, receiver)
        first = writer.pack(0, (1,), (3,))
        arrived = link.receive(first, DEADLINE_S)
        writer.send(0)
        assert writer.said() == ""
        arrived.wait(DEADLINE_S)
        second = writer.pack(1, (5, 6), (7, 8))
        writer.stop()
        late = link.receive(second, DEADLINE_S)
        link.close()
        error = ended(late)
        assert error is None or isinstance(error, WorkerFailed)
        receiver.data[:] = PATTERN
        writer.send(1)
        writer.wake()
        writer.said()  # by now it has sent all it could
        assert (receiver.data == PATTERN).all()
        other = self.make_end(world, 4)
        self.make_pair(world, other, receiver, "other").move([0], [20])
        expected = np.full_like(receiver.data, PATTERN)
        expected[20] = other.data[0]
        assert np.array_equal(receiver.data, expected)
