"""Which bytes of a writer's blocks belong where in a receiver's, whose layout may be another.

    plan ─ slices of bytes, for layouts of one KV type
      ├ shards ─ which heads each rank gives each other rank, and of which blocks
      └ overlaps ─ runs of tokens, for every pair of layouts; what converts KV types works on these

Blocks are counted within the sequence: token ``t`` lies in slot ``t % block_size`` of block
``t // block_size`` of the sequence's block table.

Plain Python: data in, data out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import GeometryMismatch, HandoffError
from kvtransfer.layout.layout import SCALE_BYTES, KvLayout


@dataclass(frozen=True, slots=True)
class Overlap:
    """Tokens that are in one block at the source and in one block at the target."""

    source_block: int
    source_slot: int
    target_block: int
    target_slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes that move in one piece. Offsets and length are in bytes, offsets within the block."""

    source_rank: int
    source_block: int
    source_offset: int
    target_rank: int
    target_block: int
    target_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """What one rank of a source gives one rank of a target: heads of some blocks."""

    source_rank: int
    target_rank: int
    heads: range
    """Of the model. All that both ranks hold, and one alone where several source ranks hold it."""
    turn: int = 0
    step: int = 0
    turns: int = 1
    """Several source ranks with the same head take turns: see ``has``."""

    def has(self, block: int) -> bool:
        """Whether block ``block`` of the source is given, counted as ``Slice`` counts it."""
        return (block * self.step + self.turn) % self.turns == 0


def shards(source: KvLayout, target: KvLayout) -> list[Shard]:
    """Of every pair of ranks that has one. By target rank, then by head.

    Every head that a target rank holds comes from one source rank, of each block.
    """
    found = []
    for target_rank in range(target.tensor_parallel):
        for source_rank in range(source.tensor_parallel):
            shard = _shard(source, target, source_rank, target_rank)
            if shard is not None:
                found.append(shard)
    return found


def _shard(source: KvLayout, target: KvLayout, source_rank: int, target_rank: int) -> Shard | None:
    here, there = source.heads_of(source_rank), target.heads_of(target_rank)
    heads = range(max(here.start, there.start), min(here.stop, there.stop))
    if not heads:
        return None
    holders, copies = source.ranks_of(heads[0]), target.ranks_of(heads[0])
    if len(holders) == 1:
        return Shard(source_rank, target_rank, heads)
    # Every copy of every block takes the next replica. With as many copies as replicas each copy
    # keeps its own, so that equal geometries move from rank to same rank.
    turn = (target_rank - copies.start) - (source_rank - holders.start)
    shard = Shard(source_rank, target_rank, heads, turn, len(copies), len(holders))
    return shard if any(shard.has(block) for block in range(len(holders))) else None


def plan(source: KvLayout, target: KvLayout, first: int, last: int) -> list[Slice]:
    """The fewest slices that bring the tokens [first, last) into the target's blocks.

    Ascending by tokens, then by target rank. Each target rank gets every head that it holds; where
    several source ranks hold it, they take turns by source block. No byte of the target is named
    twice. Where the blocks of two ranks are alike, whole blocks go, in one slice each: the last one
    too if the tokens fill only part of it, so that a range ends within a block only where the
    sequence ends. Else nothing but the tokens' bytes is named.

    Raises GeometryMismatch where bytes cannot be brought over unchanged, or where there is a
    drafter's part, HandoffError for a range that is none.
    """
    check_convertible(source, target)
    if source.drafter is not None:
        raise GeometryMismatch(f"parts of {source} cannot be planned: a drafter has its own")
    if source.kv_dtype != target.kv_dtype:
        raise GeometryMismatch(f"codes of {source} are not those of {target}")
    given = shards(source, target)
    slices: list[Slice] = []
    for overlap in overlaps(source, target, first, last):
        for shard in given:
            if shard.has(overlap.source_block):
                slices.extend(_slices(source, target, overlap, shard))
    return slices


def overlaps(source: KvLayout, target: KvLayout, first: int, last: int) -> Iterator[Overlap]:
    """The tokens [first, last), cut wherever a block of either side ends; ascending.

    Raises HandoffError for a range that is none.
    """
    if not 0 <= first <= last:
        raise HandoffError(f"there are no tokens from {first} to {last}")
    while first < last:
        source_block, source_slot = divmod(first, source.block_size)
        target_block, target_slot = divmod(first, target.block_size)
        source_room, target_room = source.block_size - source_slot, target.block_size - target_slot
        tokens = min(source_room, target_room, last - first)
        yield Overlap(source_block, source_slot, target_block, target_slot, tokens)
        first += tokens


def check_convertible(source: KvLayout, target: KvLayout) -> None:
    """Raises GeometryMismatch, which names both, unless they hold the same rows of both groups.

    Block size, tensor parallelism and KV type may differ.
    """
    if (source.layers, source.kv_heads, source.head_dim, source.drafter) != (
        target.layers,
        target.kv_heads,
        target.head_dim,
        target.drafter,
    ):
        raise GeometryMismatch(f"the source has {source}, the target has {target}")


def _slices(source: KvLayout, target: KvLayout, overlap: Overlap, shard: Shard) -> Iterator[Slice]:
    """What one source rank gives one target rank of one overlap."""
    here, there = source.of_rank(shard.source_rank), target.of_rank(shard.target_rank)

    def between(source_offset: int, target_offset: int, length: int) -> Slice:
        return Slice(
            shard.source_rank,
            overlap.source_block,
            source_offset,
            shard.target_rank,
            overlap.target_block,
            target_offset,
            length,
        )

    if _is_whole(here, there, overlap, shard.heads):
        yield between(0, 0, here.block_bytes)
        return
    first = shard.heads.start
    heads = (
        first - source.heads_of(shard.source_rank).start,
        first - target.heads_of(shard.target_rank).start,
        len(shard.heads),
    )
    for source_row, target_row, rows in _runs(here, there, overlap, *heads):
        yield between(
            here.code_offset(source_row), there.code_offset(target_row), rows * here.row_bytes
        )
        if here.has_scales:
            yield between(
                here.scale_offset(source_row), there.scale_offset(target_row), rows * SCALE_BYTES
            )


def _is_whole(here: KvLayout, there: KvLayout, overlap: Overlap, heads: range) -> bool:
    """Whether the two blocks are alike, and no token before those of the overlap is in them."""
    return (
        here.block_size == there.block_size
        and len(heads) == here.kv_heads == there.kv_heads
        and overlap.source_slot == 0
    )


def _runs(
    source: KvLayout,
    target: KvLayout,
    overlap: Overlap,
    source_head: int,
    target_head: int,
    heads: int,
) -> Iterator[tuple[int, int, int]]:
    """(source row, target row, rows) of the rows that follow one another on both sides.

    Of some heads, counted in their ranks, from ``source_head`` and ``target_head``.
    """
    rows = overlap.tokens
    if rows == source.block_size == target.block_size:
        # A head's last slot is followed by the next head's first one, on both sides.
        heads, rows = 1, heads * rows
    for layer in range(source.layers):
        for which in (0, 1):
            for head in range(heads):
                yield (
                    source.row(layer, which, source_head + head, overlap.source_slot),
                    target.row(layer, which, target_head + head, overlap.target_slot),
                    rows,
                )
