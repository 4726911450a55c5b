"""kvtransfer/memory/memory.py."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt
import pytest

from baton.errors import HandoffError
from kvtransfer.memory.checksum import checksum
from kvtransfer.memory.memory import BlockMemory, HostMemory, SharedFile
from kvtransfer.memory.shared_pool import allocate, inode_of, open_shared

BLOCKS, BLOCK_BYTES = 5, 192


@pytest.fixture
def data() -> npt.NDArray[np.uint8]:
    return np.random.default_rng(0).integers(0, 256, (BLOCKS, BLOCK_BYTES), dtype=np.uint8)


@pytest.fixture
def memory(data: npt.NDArray[np.uint8]) -> BlockMemory:
    return HostMemory(data)


def test_what_it_says_of_itself(data: npt.NDArray[np.uint8], memory: BlockMemory) -> None:
    assert (memory.blocks, memory.block_bytes) == (BLOCKS, BLOCK_BYTES)
    assert memory.device == "cpu"
    assert memory.shared_file is None
    assert HostMemory(data, SharedFile(7, 960)).shared_file == SharedFile(7, 960)


PARTS = [(0, 0, BLOCK_BYTES), (4, 0, BLOCK_BYTES), (2, 64, 128), (3, 5, 61), (1, BLOCK_BYTES, 0)]


@pytest.mark.parametrize(("block", "offset", "length"), PARTS)
def test_parts_are_read(
    data: npt.NDArray[np.uint8], memory: BlockMemory, block: int, offset: int, length: int
) -> None:
    expected = data[block, offset : offset + length].tobytes()
    out = bytearray(length)
    assert memory.checksum(block, offset, length) == checksum(expected)
    assert memory.read(block, offset, memoryview(out)) == checksum(expected)
    assert out == expected


@pytest.mark.parametrize(("block", "offset", "length"), PARTS)
def test_parts_are_written_and_nothing_else(
    data: npt.NDArray[np.uint8], memory: BlockMemory, block: int, offset: int, length: int
) -> None:
    fresh = np.random.default_rng(1).integers(0, 256, length, dtype=np.uint8)
    expected = data.copy()
    expected[block, offset : offset + length] = fresh
    assert memory.write(block, offset, fresh.data) == checksum(fresh.data)
    assert np.array_equal(data, expected)


@pytest.mark.parametrize(
    ("block", "offset", "length"),
    [(-1, 0, 64), (BLOCKS, 0, 64), (0, -64, 64), (0, 0, 193), (4, 160, 64), (0, 193, 0)],
)
def test_parts_that_there_are_not_are_refused(
    data: npt.NDArray[np.uint8], memory: BlockMemory, block: int, offset: int, length: int
) -> None:
    before = data.copy()
    with pytest.raises(HandoffError, match="5 blocks of 192 bytes"):
        memory.read(block, offset, memoryview(bytearray(length)))
    with pytest.raises(HandoffError):
        memory.write(block, offset, memoryview(bytes(length)))
    with pytest.raises(HandoffError):
        memory.checksum(block, offset, length)
    assert np.array_equal(data, before)


def test_a_negative_length_is_refused(memory: BlockMemory) -> None:
    with pytest.raises(HandoffError):
        memory.checksum(0, 128, -64)


def test_lengths_are_bytes_whatever_the_items_are(memory: BlockMemory) -> None:
    words = np.arange(16, dtype=np.uint64)
    assert memory.write(1, 0, words.data) == checksum(words.data)
    out = memoryview(bytearray(128)).cast("Q")
    memory.read(1, 0, out)
    assert out.tolist() == words.tolist()


def test_a_process_that_maps_the_pool_sees_what_is_written() -> None:
    pool = allocate(BLOCKS * BLOCK_BYTES)
    try:
        memory = HostMemory(pool.data.reshape(BLOCKS, BLOCK_BYTES), pool.file)
        file = open_shared(os.getpid(), pool.file.descriptor, inode_of(pool.file), pool.file.bytes)
        mapped = file[: BLOCKS * BLOCK_BYTES].reshape(BLOCKS, BLOCK_BYTES)
        memory.write(3, 64, memoryview(b"\x07" * 128))
        assert (mapped[3, 64:] == 7).all()
        assert int(mapped.sum(dtype=np.int64)) == 7 * 128
    finally:
        pool.close()


def test_other_data_is_refused() -> None:
    for data in (
        np.zeros((4, 64), dtype=np.int8),
        np.zeros(256, dtype=np.uint8),
        np.zeros((4, 128), dtype=np.uint8)[:, ::2],
    ):
        with pytest.raises(ValueError, match="contiguous uint8"):
            HostMemory(data)  # type: ignore[arg-type]
