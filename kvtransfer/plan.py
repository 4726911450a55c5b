"""Which bytes of a writer's blocks belong where in a receiver's, whose layout may be another.

    plan ─ slices of bytes, for layouts of one KV type
      └ overlaps ─ runs of tokens, for every pair of layouts; what converts KV types works on these

Blocks are counted within the sequence: token ``t`` lies in slot ``t % block_size`` of block
``t // block_size`` of the sequence's block table.

Plain Python: data in, data out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from baton.errors import GeometryMismatch, HandoffError
from kvtransfer.layout import SCALE_BYTES, KvLayout


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
    slices: list[Slice] = []
    for overlap in overlaps(source, target, first, last):
        for rank in range(target.tensor_parallel):
            for reader, heads in _readers(source, target, rank, overlap.source_block):
                slices.extend(_slices(source, target, overlap, reader, rank, heads))
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


def _readers(
    source: KvLayout, target: KvLayout, rank: int, source_block: int
) -> Iterator[tuple[int, range]]:
    """The source ranks that a target rank takes a block from, and which heads from each."""
    copy = rank % target.replicas
    # Every copy of every block takes the next replica. With as many copies as replicas each copy
    # keeps its own, so that equal geometries move from rank to same rank.
    replica = (source_block * target.replicas + copy) % source.replicas
    for reader, run in groupby(target.heads_of(rank), lambda head: source.ranks_of(head)[replica]):
        heads = list(run)
        yield reader, range(heads[0], heads[-1] + 1)


def _slices(
    source: KvLayout, target: KvLayout, overlap: Overlap, reader: int, rank: int, heads: range
) -> Iterator[Slice]:
    """What one source rank gives one target rank of one overlap: ``heads`` of the model."""

    def between(source_offset: int, target_offset: int, length: int) -> Slice:
        return Slice(
            reader,
            overlap.source_block,
            source_offset,
            rank,
            overlap.target_block,
            target_offset,
            length,
        )

    if _is_whole(source, target, overlap, heads):
        yield between(0, 0, source.block_bytes)
        return
    here, there = heads[0] - source.heads_of(reader)[0], heads[0] - target.heads_of(rank)[0]
    for source_row, target_row, rows in _runs(source, target, overlap, here, there, len(heads)):
        yield between(
            source.code_offset(source_row), target.code_offset(target_row), rows * source.row_bytes
        )
        if source.has_scales:
            yield between(
                source.scale_offset(source_row), target.scale_offset(target_row), rows * SCALE_BYTES
            )


def _is_whole(source: KvLayout, target: KvLayout, overlap: Overlap, heads: range) -> bool:
    """Whether the two blocks are alike, and no token before those of the overlap is in them."""
    return (
        source.block_size == target.block_size
        and len(heads) == source.heads_per_rank == target.heads_per_rank
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
