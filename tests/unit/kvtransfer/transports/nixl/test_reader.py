"""kvtransfer/transports/nixl/reader.py over an agent that reads when the test decides."""

from __future__ import annotations

import ctypes
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import cast

import numpy as np
import pytest

from baton.errors import ChecksumMismatch, DeadlineExceeded, HandoffError, WorkerFailed
from kvtransfer.memory.memory import HostMemory
from kvtransfer.transports.encryption import Encryptor, new_key, wire_bytes
from kvtransfer.transports.nixl.agent import NixlAgent
from kvtransfer.transports.nixl.reader import SLOT_BYTES, NixlReader, Source, WriterMemory
from kvtransfer.transports.transfer import Transfer
from kvtransfer.transports.transport import AnnouncedBatch, Parts

PATIENCE_S = 30.0
BLOCKS, BLOCK_BYTES = 8, SLOT_BYTES // 2 - 64
SLOTS = 4


@dataclass
class Read:
    """A read in progress."""

    writer: str
    remote: int
    local: int
    length: int
    ended: bool = False
    error: WorkerFailed | None = None
    released: bool = False

    def land(self) -> None:
        ctypes.memmove(self.local, self.remote, self.length)
        self.ended = True


@dataclass
class Agent:
    """Copies nothing by itself."""

    reads: list[Read] = field(default_factory=list)
    known: list[str] = field(default_factory=list)
    gone: set[str] = field(default_factory=set)

    def register(self, address: int, length: int) -> None:
        assert length == SLOTS * SLOT_BYTES

    def load(self, metadata: bytes) -> str:
        if metadata == b"garbage":
            raise HandoffError("a peer's nixl metadata cannot be used")
        self.known.append(metadata.decode())
        return metadata.decode()

    def forget(self, name: str) -> None:
        assert all(read.released for read in self.reads if read.writer == name)
        self.known.remove(name)

    def begin_read(self, name: str, remote: int, local: int, length: int) -> int:
        assert name in self.known
        if name in self.gone:
            raise WorkerFailed(f"nixl has lost {name}")
        busy = {read.local for read in self.reads if not read.ended}
        assert local not in busy, "staging is used twice at once"
        self.reads.append(Read(name, remote, local, length))
        return len(self.reads) - 1

    def ended(self, name: str, handle: int) -> bool:
        read = self.reads[handle]
        if read.error is not None:
            read.ended = True
            raise read.error
        return read.ended

    def release(self, handle: int) -> None:
        assert self.reads[handle].ended, "a read that goes on has lost its handle"
        self.reads[handle].released = True


class Bench:
    """A receiver of empty blocks, and writers of random ones."""

    def __init__(self) -> None:
        self.theirs = np.random.default_rng(1).integers(
            0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8
        )
        self.ours = np.zeros((BLOCKS, BLOCK_BYTES), dtype=np.uint8)
        self.agent = Agent()
        self.reader = NixlReader(
            cast(NixlAgent, self.agent), HostMemory(self.ours), SLOTS * SLOT_BYTES
        )
        self._staging = np.empty(16 * SLOT_BYTES, dtype=np.uint8)
        self._used = 0
        self._encryptors: dict[Source, Encryptor] = {}
        self._number = 0

    def source(self, writer: str = "writer", metadata: bytes | None = None) -> Source:
        memory = WriterMemory(
            agent=writer,
            metadata=writer.encode() if metadata is None else metadata,
            address=self._staging.ctypes.data,
            bytes=self._staging.nbytes,
        )
        key = new_key()
        source = Source(memory, key)
        self._encryptors[source] = Encryptor(key)
        self.reader.open(source)
        return source

    def receive(
        self, source: Source, *blocks: int, deadline_s: float = PATIENCE_S, damaged: bool = False
    ) -> Transfer:
        self._number += 1
        parts = Parts(blocks, 64, BLOCK_BYTES - 64)
        step, at = wire_bytes(parts.length), self._used
        self._used += step * len(blocks)
        outs = [self._staging[start : start + step].data for start in range(at, self._used, step)]
        self._encryptors[source].encrypt(HostMemory(self.theirs), self._number, parts, 0, outs)
        self._staging[at + 1000] ^= damaged
        transfer = source.transfers.new()
        source.add(AnnouncedBatch(self._number, parts, parts, (), at), transfer, deadline_s)
        self.reader.wake()
        return transfer

    def reads(self, count: int) -> list[Read]:
        """Reads in progress, once there are this many."""
        until(lambda: len(self._in_progress()) == count)
        return self._in_progress()

    def _in_progress(self) -> list[Read]:
        return [read for read in self.agent.reads if not read.ended]

    def arrived(self) -> set[int]:
        """The blocks that are there whole; another one may be on its way just now."""
        pairs = zip(self.ours[:, 64:], self.theirs[:, 64:], strict=True)
        return {block for block, pair in enumerate(pairs) if np.array_equal(*pair)}

    def placed(self) -> set[int]:
        """The blocks that have arrived, when nothing is on its way; the others are untouched."""
        whole = {block for block in range(BLOCKS) if self.ours[block].any()}
        for block in whole:
            assert not self.ours[block, :64].any()
            np.testing.assert_array_equal(self.ours[block, 64:], self.theirs[block, 64:])
        return whole

    def close(self) -> None:
        assert self.reader.close()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def bench() -> Iterator[Bench]:
    before = threading.active_count()
    bench = Bench()
    yield bench
    bench.close()
    assert threading.active_count() == before


def test_a_large_batch_arrives_in_several_reads(bench: Bench) -> None:
    transfer = bench.receive(bench.source(), 7, 0, 1, 2, 3)
    first, second = bench.reads(2)
    second.land()
    first.land()
    (third,) = bench.reads(1)
    assert not transfer.poll()
    third.land()
    transfer.wait(PATIENCE_S)
    assert bench.placed() == {7, 0, 1, 2, 3}


def test_the_next_batch_is_read_while_one_is_in_flight(bench: Bench) -> None:
    source = bench.source()
    one, two = bench.receive(source, 0), bench.receive(source, 1)
    first, second = bench.reads(2)
    second.land()
    two.wait(PATIENCE_S)
    assert not one.poll()
    first.land()
    one.wait(PATIENCE_S)


def test_a_damaged_part_fails_its_batch_alone(bench: Bench) -> None:
    source = bench.source()
    bad, good = bench.receive(source, 0, damaged=True), bench.receive(source, 1)
    for read in bench.reads(2):
        read.land()
    good.wait(PATIENCE_S)
    with pytest.raises(ChecksumMismatch):
        bad.wait(PATIENCE_S)


def test_what_was_given_up_is_never_placed_and_keeps_its_slot(bench: Bench) -> None:
    source = bench.source()
    cancelled, late = bench.receive(source, 0), bench.receive(source, 1, deadline_s=0.01)
    stopped = bench.reads(2)
    cancelled.cancel()
    with pytest.raises(CancelledError):
        cancelled.wait(PATIENCE_S)
    with pytest.raises(DeadlineExceeded):
        late.wait(PATIENCE_S)

    # Both slots of this writer are taken. Those of another are not.
    waiting = bench.receive(source, 2)
    other = bench.receive(bench.source("other"), 3)
    (theirs,) = [read for read in bench.reads(3) if read.writer == "other"]
    theirs.land()
    other.wait(PATIENCE_S)
    assert bench.reads(2) == stopped

    # The writer wakes.
    for read in stopped:
        read.land()
    (last,) = bench.reads(1)
    last.land()
    waiting.wait(PATIENCE_S)
    assert bench.placed() == {2, 3}


def test_a_batch_that_is_late_before_it_is_read_is_never_read(bench: Bench) -> None:
    source = bench.source()
    bench.receive(source, 0, 1, 2, 3)
    stopped = bench.reads(2)
    late = bench.receive(source, 4, deadline_s=0.01)
    with pytest.raises(DeadlineExceeded):
        late.wait(PATIENCE_S)
    for read in stopped:
        read.land()
    until(lambda: bench.arrived() == {0, 1, 2, 3})
    assert bench.placed() == {0, 1, 2, 3}
    assert len(bench.agent.reads) == 2


def test_a_lost_writer_fails_all_its_batches_and_its_link(bench: Bench) -> None:
    source = bench.source()
    transfers = [bench.receive(source, block) for block in range(4)]
    first, second = bench.reads(2)
    first.error = WorkerFailed("nixl has lost writer")
    for transfer in transfers:
        with pytest.raises(WorkerFailed):
            transfer.wait(PATIENCE_S)
    with pytest.raises(WorkerFailed):
        bench.receive(source, 5).wait(PATIENCE_S)

    # It is forgotten when its last read has ended; until then a new link has to wait.
    again = bench.receive(bench.source(), 6)
    assert bench.reads(1) == [second]
    second.error = WorkerFailed("nixl has lost writer")
    until(lambda: len(bench.agent.reads) == 3)
    bench.agent.reads[-1].land()
    again.wait(PATIENCE_S)
    assert bench.placed() == {6}


def test_a_writer_that_is_gone_before_a_read_fails_the_link(bench: Bench) -> None:
    source = bench.source()
    bench.agent.gone.add("writer")
    with pytest.raises(WorkerFailed):
        bench.receive(source, 0).wait(PATIENCE_S)
    until(lambda: not bench.agent.known)


def test_a_closed_link_is_forgotten_when_its_reads_have_ended(bench: Bench) -> None:
    source = bench.source()
    transfer = bench.receive(source, 0)
    (read,) = bench.reads(1)
    source.transfers.end(WorkerFailed("the pair was closed"))
    source.closed = True
    bench.reader.wake()
    with pytest.raises(WorkerFailed, match="closed"):
        transfer.wait(PATIENCE_S)
    assert bench.agent.known == ["writer"]
    read.land()
    until(lambda: not bench.agent.known)
    assert bench.placed() == set()


@pytest.mark.parametrize("metadata", [b"garbage", b"another"])
def test_metadata_that_does_not_fit_fails_the_link(bench: Bench, metadata: bytes) -> None:
    with pytest.raises(HandoffError):
        bench.receive(bench.source("writer", metadata), 0).wait(PATIENCE_S)
    until(lambda: not bench.agent.known)


def test_its_end_fails_calls_in_flight(bench: Bench) -> None:
    source = bench.source()
    transfer = bench.receive(source, 0)
    bench.reads(1)
    assert bench.reader.close()
    with pytest.raises(WorkerFailed, match="stopping"):
        transfer.wait(PATIENCE_S)
    with pytest.raises(WorkerFailed, match="stopping"):
        bench.receive(bench.source("late"), 1).wait(PATIENCE_S)
