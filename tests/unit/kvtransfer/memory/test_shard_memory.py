"""Packed bytes are moved and compared with what the plan's slices do to the same blocks."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import HandoffError
from kvtransfer.layout.layout import KvLayout
from kvtransfer.layout.reshard import plan
from kvtransfer.layout.shard_layout import ShardLayout, shard_of, shards_to
from kvtransfer.memory.memory import BlockMemory, HostMemory
from kvtransfer.memory.shard_memory import (
    PeerBlocks,
    Pieces,
    ShardMemory,
    source_memory,
    target_memory,
)
from tests.support.kvtransfer.array_memory import ArrayMemory

Bytes = npt.NDArray[np.uint8]
BLOCKS = 6


@dataclass(frozen=True)
class Ends:
    """Blocks of all ranks of a writer and of a receiver."""

    source: KvLayout
    target: KvLayout
    sources: list[Bytes]
    targets: list[Bytes]

    @classmethod
    def of(cls, source: KvLayout, target: KvLayout) -> Ends:
        random = np.random.default_rng(7)

        def blocks(layout: KvLayout) -> list[Bytes]:
            sizes = [layout.of_rank(rank).block_bytes for rank in range(layout.tensor_parallel)]
            return [random.integers(0, 256, (BLOCKS, size), np.uint8) for size in sizes]

        return cls(source, target, blocks(source), blocks(target))

    def expected(self) -> list[Bytes]:
        """The receiver's blocks once all of the writer's have come, by the plan."""
        found = [data.copy() for data in self.targets]
        for each in plan(self.source, self.target, 0, BLOCKS * self.source.block_size):
            end = each.target_offset + each.length
            data = self.sources[each.source_rank][each.source_block]
            part = data[each.source_offset : each.source_offset + each.length]
            found[each.target_rank][each.target_block, each.target_offset : end] = part
        return found

    def shards(self) -> list[ShardLayout]:
        """Of all pairs of ranks."""
        ranks = range(self.target.tensor_parallel)
        return [shard for rank in ranks for shard in shards_to(self.source, self.target, rank)]


def layouts(heads: int, source: int, target: int, dtype: str = "int8") -> tuple[KvLayout, KvLayout]:
    return KvLayout(4, 3, heads, 5, dtype, source), KvLayout(4, 3, heads, 5, dtype, target)


CASES = [
    (heads, source, target)
    for heads, (source, target) in itertools.product(
        (1, 2, 3, 8), ((1, 2), (2, 1), (2, 4), (4, 2), (2, 2), (3, 2))
    )
]


def parts(shard: ShardLayout, step: int) -> list[tuple[int, int]]:
    """A block's packed bytes in parts of ``step`` bytes: offset and length."""
    size = shard.block_bytes
    return [(start, min(step, size - start)) for start in range(0, size, step)]


@pytest.mark.parametrize("kind", ["host", "piece by piece"])
@pytest.mark.parametrize(("heads", "source", "target"), CASES)
def test_what_is_read_and_written_is_what_the_plan_names(
    heads: int, source: int, target: int, kind: str
) -> None:
    ends = Ends.of(*layouts(heads, source, target))
    expected = ends.expected()

    def memory(data: Bytes) -> BlockMemory:
        if kind == "host":
            return HostMemory(data)
        found = ArrayMemory(1, 1)
        found.array, found.blocks, found.block_bytes = data, *data.shape
        return found

    for shard in ends.shards():
        here = source_memory(memory(ends.sources[shard.shard.source_rank]), shard)
        there = target_memory(memory(ends.targets[shard.shard.target_rank]), shard)
        assert here.block_bytes == there.block_bytes == shard.block_bytes
        given = [block for block in range(BLOCKS) if shard.shard.has(block)]
        for offset, length in parts(shard, 37):
            packed = bytearray(len(given) * length)
            outs = [memoryview(packed)[at : at + length] for at in range(0, len(packed), length)]
            sums = here.read_many(given, offset, outs)
            assert sums == here.checksum_many(given, offset, length)
            starts = range(0, len(packed), length)
            assert there.write_many(given, offset, length, memoryview(packed), starts) == sums
            assert there.checksum_many(given, offset, length) == sums
            assert there.checksum(given[0], offset, length) == sums[0]
    for found, wanted in zip(ends.targets, expected, strict=True):
        assert (found == wanted).all()


@pytest.mark.parametrize(("heads", "source", "target"), CASES)
def test_mapped_blocks_are_copied_without_a_detour(heads: int, source: int, target: int) -> None:
    ends = Ends.of(*layouts(heads, source, target, "bfloat16"))
    expected = ends.expected()
    for shard in ends.shards():
        data = ends.sources[shard.shard.source_rank]
        here = source_memory(HostMemory(data), shard)
        memory = HostMemory(ends.targets[shard.shard.target_rank])
        there = ShardMemory(memory, shard.target_planes, shard.block_bytes)
        pieces = Pieces(shard.source_planes)
        if shard.is_whole:
            continue
        given = [block for block in range(BLOCKS) if shard.shard.has(block)]
        for offset, length in parts(shard, 100):
            peer = PeerBlocks(data.reshape(-1), shard.source_block_bytes, pieces, given)
            sums = there.copy_from(given, offset, length, peer)
            assert sums == here.checksum_many(given, offset, length)
    for shard in ends.shards():
        if shard.is_whole:
            rank = shard.shard.target_rank
            given = [block for block in range(BLOCKS) if shard.shard.has(block)]
            ends.targets[rank][given] = ends.sources[shard.shard.source_rank][given]
    for found, wanted in zip(ends.targets, expected, strict=True):
        assert (found == wanted).all()


@settings(max_examples=150, deadline=None, derandomize=True, database=None)
@given(st.integers(1, 9), st.integers(1, 6), st.integers(1, 6), st.sampled_from(["int8", "fp8"]))
def test_packed_bytes_are_those_of_the_floor(
    heads: int, source: int, target: int, dtype: str
) -> None:
    here, there = layouts(heads, source, target, dtype)
    floor = sum(each.length for each in plan(here, there, 0, BLOCKS * 4))
    packed = sum(
        shard.block_bytes * sum(map(shard.shard.has, range(BLOCKS)))
        for rank in range(target)
        for shard in shards_to(here, there, rank)
    )
    assert packed == floor


@pytest.mark.parametrize(("heads", "source", "target"), CASES)
def test_layer_runs_cover_a_block_once(heads: int, source: int, target: int) -> None:
    ends = Ends.of(*layouts(heads, source, target))
    for shard in ends.shards():
        assert shard.layer_runs(0, 3) == [(0, shard.block_bytes)]
        runs = sorted(run for layer in range(3) for run in shard.layer_runs(layer, layer + 1))
        assert [start for start, _ in runs] == [
            0,
            *itertools.accumulate(length for _, length in runs[:-1]),
        ]
        assert sum(length for _, length in runs) == shard.block_bytes


def test_planes_that_change_places_have_another_checksum() -> None:
    here, there = layouts(3, 1, 2)
    shard = shard_of(here, there, 0, 1)
    data = np.random.default_rng(1).integers(0, 256, (1, here.block_bytes), np.uint8)
    memory = source_memory(HostMemory(data), shard)
    before = memory.checksum(0, 0, shard.block_bytes)
    one, two = shard.source_planes[0], shard.source_planes[3]
    first = data[0, one.place : one.place + one.length].copy()
    data[0, one.place : one.place + one.length] = data[0, two.place : two.place + two.length]
    data[0, two.place : two.place + two.length] = first
    assert memory.checksum(0, 0, shard.block_bytes) != before


def test_ranks_without_a_head_in_common_have_no_share() -> None:
    with pytest.raises(HandoffError, match="rank 0 of 2 has nothing for rank 1 of 2"):
        shard_of(*layouts(4, 2, 2), 0, 1)


def test_parts_that_cannot_be_are_refused() -> None:
    here, there = layouts(2, 1, 2)
    shard = shard_of(here, there, 0, 1)
    memory = source_memory(HostMemory(np.zeros((2, here.block_bytes), np.uint8)), shard)
    for blocks, offset, length in (([2], 0, 8), ([0], shard.block_bytes - 4, 8), ([-1], 0, 8)):
        with pytest.raises(HandoffError, match=r"has no .* bytes at"):
            memory.checksum_many(blocks, offset, length)
