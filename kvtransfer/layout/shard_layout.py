"""The bytes that one rank's block shares with a block of another rank, in sequence.

Such bytes are *packed*: the keys of the shared heads of layer 0, their values, those of layer 1, …,
then the scales, if any, in the same order. Writer and receiver count offsets in packed bytes, so a
part has the same offset at both ends, wherever its bytes are. The keys or values of one layer form
a *plane*, which is contiguous at both ends.

If both ranks have the same heads, nothing is packed: whole blocks are sent, with their padding and
their drafter's part.

Plain Python.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from baton.errors import HandoffError
from kvtransfer.layout.layout import SCALE_BYTES, KvLayout
from kvtransfer.layout.reshard import Shard, shards


@dataclass(frozen=True, slots=True)
class Plane:
    """Consecutive bytes of one layer's keys or values. Offsets and length are in bytes."""

    number: int
    packed: int
    """Offset of the first byte, counted in the packed bytes that two ranks share."""
    place: int
    """Offset of the first byte in the rank's block."""
    length: int


class ShardLayout:
    """The bytes of a block that two ranks have in common, in packed form. Their workers have equal
    block sizes and KV types."""

    def __init__(self, source: KvLayout, target: KvLayout, shard: Shard) -> None:
        """``source`` and ``target`` are the layouts of the whole workers, not of their ranks."""
        self.shard = shard
        self._source = source.of_rank(shard.source_rank)
        self._target = target.of_rank(shard.target_rank)
        first, heads = shard.heads.start, len(shard.heads)
        self._source_head = first - source.heads_of(shard.source_rank).start
        self._target_head = first - target.heads_of(shard.target_rank).start
        self.is_whole = heads == self._source.kv_heads == self._target.kv_heads
        """Whether whole blocks are sent unchanged, because both ranks have the same heads."""
        self.layers = source.layers
        self._packed = replace(self._source, kv_heads=heads, drafter=None)

    @cached_property
    def block_bytes(self) -> int:
        """Number of packed bytes for one block."""
        return self._source.block_bytes if self.is_whole else self._packed.used_bytes

    def layer_runs(self, first: int, last: int) -> list[tuple[int, int]]:
        """Return (offset, bytes) pairs that cover the layers ``first`` … ``last - 1`` in a block's
        packed bytes.

        See ``KvLayout.layer_runs``. All layers together are one pair.
        """
        if (first, last) == (0, self.layers):
            return [(0, self.block_bytes)]
        if self.is_whole:
            return self._source.layer_runs(first, last)
        end = self.block_bytes
        runs = self._packed.layer_runs(first, last)
        return [(start, min(start + length, end) - start) for start, length in runs]

    @property
    def source_block_bytes(self) -> int:
        """Number of bytes in a block of the writer's rank."""
        return self._source.block_bytes

    @cached_property
    def source_planes(self) -> tuple[Plane, ...]:
        """The parts of a writer's block that are sent, with their offsets in that block, in the
        order of the packed bytes."""
        return self._planes(self._source, self._source_head)

    @cached_property
    def target_planes(self) -> tuple[Plane, ...]:
        """The parts of a receiver's block that arrive, with their offsets in that block, in the
        order of the packed bytes."""
        return self._planes(self._target, self._target_head)

    def _planes(self, block: KvLayout, first_head: int) -> tuple[Plane, ...]:
        packed = self._packed
        rows = packed.kv_heads * packed.block_size
        planes = []
        for number in range(packed.layers * 2):
            row = block.row(*divmod(number, 2), first_head, 0)
            length = rows * packed.row_bytes
            planes.append(Plane(number, number * length, block.code_offset(row), length))
        for number in range(packed.layers * 2 * packed.has_scales):
            row = block.row(*divmod(number, 2), first_head, 0)
            length = rows * SCALE_BYTES
            start = packed.codes_bytes + number * length
            planes.append(Plane(len(planes), start, block.scale_offset(row), length))
        return tuple(planes)


def shards_to(source: KvLayout, target: KvLayout, target_rank: int) -> list[ShardLayout]:
    """Return what one rank of a receiver gets: one layout for each rank of the writer that has
    heads in common with it."""
    return [
        ShardLayout(source, target, shard)
        for shard in shards(source, target)
        if shard.target_rank == target_rank
    ]


def shard_of(source: KvLayout, target: KvLayout, source_rank: int, target_rank: int) -> ShardLayout:
    """Return the layout of the bytes that one rank sends to another. Raises HandoffError if the two
    ranks have no head in common."""
    for found in shards_to(source, target, target_rank):
        if found.shard.source_rank == source_rank:
            return found
    raise HandoffError(
        f"rank {source_rank} of {source.tensor_parallel} has nothing for rank {target_rank} of "
        f"{target.tensor_parallel}: they share no KV head"
    )
