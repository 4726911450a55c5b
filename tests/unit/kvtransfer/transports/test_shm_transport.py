"""What is particular to shared memory; what all transports do is in tests/transports."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from baton.errors import ConfigError, HandoffError, WorkerFailed
from kvtransfer.memory.checksum import checksum
from kvtransfer.memory.memory import HostMemory
from kvtransfer.memory.seal_board import BOARD_BYTES, read_seal
from kvtransfer.memory.shared_pool import allocate
from kvtransfer.transports import in_place
from kvtransfer.transports.shm_transport import ShmReceiveLink, ShmTransport
from kvtransfer.transports.transport import AnnouncedBatch, Parts, Peer

BLOCKS, BLOCK_BYTES = 5, 256
FILE_BLOCKS = BLOCKS + BOARD_BYTES // BLOCK_BYTES
DEADLINE_S = 20.0
WRITER, RECEIVER = Peer("writer", ""), Peer("receiver", "")


class World:
    """A writer and a receiver that are registered."""

    def __init__(self, stack: ExitStack) -> None:
        self.executor = ThreadPoolExecutor(2)
        stack.callback(self.executor.shutdown)
        self.data, self.transports, self.memories = [], [], []
        for seed in (1, 2):
            pool = allocate(BLOCKS * BLOCK_BYTES)
            stack.callback(pool.close)
            data = pool.data.reshape(BLOCKS, BLOCK_BYTES)
            data[:] = np.random.default_rng(seed).integers(0, 256, data.shape, dtype=np.uint8)
            transport, memory = ShmTransport(self.executor), HostMemory(data, pool.file)
            transport.register(memory)
            self.data.append(data)
            self.transports.append(transport)
            self.memories.append(memory)
        self.writer, self.receiver = self.transports

    def accept(self, **changes: object) -> ShmReceiveLink:
        """The receiver's link, for an offer that differs from the writer's."""
        offer = json.loads(self.writer.offer()) | changes
        link, answer = self.receiver.accept(WRITER, json.dumps(offer).encode())
        assert answer == b"board"
        return link


def test_a_receiver_that_reads_boards_gets_checksums_there(world: World) -> None:
    link, answer = world.receiver.accept(WRITER, world.writer.offer())
    board = world.writer.connect(RECEIVER, answer).board
    assert board is not None
    seal = board.take(2)
    assert seal is not None
    seal.publish([5, 6])
    assert link.file is not None
    assert read_seal(link.file, seal.at, seal.mark, 2) == (5, 6)
    link.close()
    assert link.file is None, "unmapped"


def test_a_receiver_of_version_0_1_gets_messages(world: World) -> None:
    assert world.writer.connect(RECEIVER, b"").board is None


@pytest.fixture
def world() -> Iterator[World]:
    with ExitStack() as stack:
        yield World(stack)


def batch_of(
    source: int, *, offset: int = 0, length: int = BLOCK_BYTES, digest: int = 0
) -> AnnouncedBatch:
    return AnnouncedBatch(
        0, Parts((source,), offset, length), Parts((3,), offset, length), (digest,)
    )


def test_memory_that_cannot_be_mapped_is_refused(world: World) -> None:
    transport = ShmTransport(world.executor)
    with pytest.raises(ConfigError, match="memory that others can map"):
        transport.register(HostMemory(np.zeros((1, 64), dtype=np.uint8)))
    transport.close()


@pytest.mark.parametrize(
    "changes", [{"boot_id": "another"}, {"pid_namespace": "pid:[1]"}, {"boot_id": ""}]
)
def test_a_writer_on_another_host_is_refused(world: World, changes: dict[str, object]) -> None:
    with pytest.raises(HandoffError, match=r"writer is (on another host|in another container)"):
        world.accept(**changes)


@pytest.mark.parametrize("changes", [{"pid": 1 << 30}, {"descriptor": 1 << 20}, {"inode": 1}])
def test_a_pool_that_is_not_there_is_refused(world: World, changes: dict[str, object]) -> None:
    with pytest.raises(HandoffError):
        world.accept(**changes)


@pytest.mark.parametrize("offer", [b"", b"{}", b"[1]", b"3", b'"x"', b"\xff", b'{"pid": 1}'])
def test_an_offer_that_cannot_be_read_is_refused(world: World, offer: bytes) -> None:
    with pytest.raises(HandoffError, match="cannot be read"):
        world.receiver.accept(WRITER, offer)


@pytest.mark.parametrize("missing", ["_BOOT_ID", "_PID_NAMESPACE"])
def test_a_machine_that_cannot_tell_who_it_is_does_without(
    world: World, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, missing: str
) -> None:
    monkeypatch.setattr(in_place, missing, tmp_path / "none")
    in_place._host.cache_clear()
    with pytest.raises(ConfigError, match="transport shm cannot identify"):
        ShmTransport(world.executor).register(world.memories[0])


@pytest.mark.parametrize(
    ("source", "offset", "length"),
    [(FILE_BLOCKS, 0, 64), (1 << 31, 0, 64), (0, 0, BLOCK_BYTES + 1), (0, BLOCK_BYTES, 1)],
)
def test_a_batch_outside_the_writers_blocks_is_refused(
    world: World, source: int, offset: int, length: int
) -> None:
    before = world.data[1].copy()
    transfer = world.accept().receive(batch_of(source, offset=offset, length=length), DEADLINE_S)
    with pytest.raises(HandoffError, match="batch 0 lies outside its writer's blocks"):
        transfer.wait(DEADLINE_S)
    assert np.array_equal(world.data[1], before)


def test_a_worker_that_is_stopping_copies_no_more(world: World) -> None:
    link = world.accept()
    world.executor.shutdown()
    with pytest.raises(WorkerFailed, match="stopping"):
        link.receive(batch_of(1), DEADLINE_S).wait(DEADLINE_S)


def test_the_receiver_reads_what_was_registered_and_nothing_else(world: World) -> None:
    link = world.writer.connect(RECEIVER, b"")
    assert not world.writer.copies_out
    parts = Parts((1, 4), 64, 128)
    expected = tuple(checksum(world.data[0][block, 64:192].data) for block in (1, 4))
    assert (
        link.pack(0, parts).checksums
        == link.pack(0, parts, world.memories[0]).checksums
        == expected
    )
    with pytest.raises(AssertionError, match="cannot read other memory"):
        link.pack(0, parts, world.memories[1])


def test_the_writers_memory_is_mapped_until_the_link_is_closed(world: World) -> None:
    def maps() -> int:
        return Path("/proc/self/maps").read_text().count("memfd:baton-kv")

    gc.collect()
    before = maps()
    link = world.accept()
    assert maps() == before + 1
    link.close()
    # A reference left to the link, in a traceback or a cycle, keeps no dead writer's pool.
    assert maps() == before
    with pytest.raises(WorkerFailed, match="the pair was closed"):
        link.receive(batch_of(1), DEADLINE_S).wait(DEADLINE_S)
