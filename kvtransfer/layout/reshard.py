"""Maps bytes of a writer's blocks to those of a receiver, whose layout may differ.

    plan ─ slices of bytes, for layouts of one KV type
    ├ shards ─ which heads each rank gives each other rank, and from which blocks
    └ overlaps ─ runs of tokens, for every pair of layouts; the conversion of KV types uses these

Blocks are counted within the sequence: token ``t`` is in slot ``t % block_size`` of block ``t //
block_size`` of the sequence's block table.

Plain Python: data in, data out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from baton.errors import GeometryMismatch, HandoffError
from kvtransfer.layout.layout import SCALE_BYTES, KvLayout


@dataclass(frozen=True, slots=True)
class Overlap:
    """Tokens that are in one block of the source, and also in one block of the target."""

    source_block: int
    source_slot: int
    target_block: int
    target_slot: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Slice:
    """Bytes of a block that are copied in one piece. Length and offsets are in bytes; offsets count
    from the beginning of the block."""

    source_rank: int
    source_block: int
    source_offset: int
    target_rank: int
    target_block: int
    target_offset: int
    length: int


@dataclass(frozen=True, slots=True)
class Shard:
    """Heads that one rank of a source worker gives one rank of a target worker, in some of the
    blocks."""

    source_rank: int
    target_rank: int
    heads: range
    """Numbers of the model's heads that both ranks have. There is only one if several source ranks
    have that head."""
    turn: int = 0
    step: int = 0
    turns: int = 1
    """Number of source ranks that have the same head. These ranks send it in turns, one block each:
    see ``has``."""

    def has(self, block: int) -> bool:
        """Whether this shard includes block ``block`` of the source, counted from the sequence's
        start."""
        return (block * self.step + self.turn) % self.turns == 0


def shards(source: KvLayout, target: KvLayout) -> list[Shard]:
    """Return the shards for all pairs of a source and a target rank that have heads in common. They
    are sorted by target rank, then by head.

    In each block, every head of a target rank comes from exactly one source rank.
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
    # Every copy of every block uses the next replica. If there are as many copies as replicas, each
    # copy keeps its own, so that equal geometries move from rank to same rank.
    turn = (target_rank - copies.start) - (source_rank - holders.start)
    shard = Shard(source_rank, target_rank, heads, turn, len(copies), len(holders))
    return shard if any(shard.has(block) for block in range(len(holders))) else None


def plan(source: KvLayout, target: KvLayout, first: int, last: int) -> list[Slice]:
    """Return the smallest number of slices that copy the tokens [first, last) into the target's
    blocks.

    Slices ascend by tokens, then by target rank. Each target rank gets every head that it has. If
    several source ranks have a head, they send it in turns, one source block each. No byte of the
    target occurs twice. If the blocks of two ranks are alike, each whole block is one slice. That
    includes the last block even if the tokens fill only part of it, so a range must end within a
    block only where the sequence ends. Otherwise only the tokens' bytes are included.

    Raises GeometryMismatch if bytes cannot be copied unchanged or if there is a drafter's part, and
    HandoffError for an invalid range.
    """
    check_convertible(source, target)
    if source.drafter is not None:
        raise GeometryMismatch(f"cannot plan slices of {source}: it has a drafter's part")
    if source.kv_dtype != target.kv_dtype:
        raise GeometryMismatch(f"codes of {source} differ from those of {target}")
    given = shards(source, target)
    slices: list[Slice] = []
    for overlap in overlaps(source, target, first, last):
        for shard in given:
            if shard.has(overlap.source_block):
                slices.extend(_slices(source, target, overlap, shard))
    return slices


def overlaps(source: KvLayout, target: KvLayout, first: int, last: int) -> Iterator[Overlap]:
    """Yield the tokens [first, last) in ascending order, divided at the end of each source block
    and each target block.

    Raises HandoffError for an invalid range.
    """
    if not 0 <= first <= last:
        raise HandoffError(f"invalid token range: {first} to {last}")
    while first < last:
        source_block, source_slot = divmod(first, source.block_size)
        target_block, target_slot = divmod(first, target.block_size)
        source_room, target_room = source.block_size - source_slot, target.block_size - target_slot
        tokens = min(source_room, target_room, last - first)
        yield Overlap(source_block, source_slot, target_block, target_slot, tokens)
        first += tokens


def check_convertible(source: KvLayout, target: KvLayout) -> None:
    """Raise GeometryMismatch unless blocks of one layout can be converted to the other. Both must
    have the same rows for a token, of the target model and of the drafter.

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
    """Yield the slices that one source rank sends to one target rank for the tokens of
    ``overlap``."""
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
    """Whether the source block and the target block are alike, and the overlap begins at their
    first slot."""
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
    """Yield (source row, target row, number of rows) for rows that are consecutive in both blocks.

    The rows belong to ``heads`` heads. ``source_head`` and ``target_head`` are the position of the
    first of these heads in the source rank's and in the target rank's blocks.
    """
    rows = overlap.tokens
    if rows == source.block_size == target.block_size:
        # A head's last slot is followed by the next head's first slot, on both sides.
        heads, rows = 1, heads * rows
    for layer in range(source.layers):
        for which in (0, 1):
            for head in range(heads):
                yield (
                    source.row(layer, which, source_head + head, overlap.source_slot),
                    target.row(layer, which, target_head + head, overlap.target_slot),
                    rows,
                )
