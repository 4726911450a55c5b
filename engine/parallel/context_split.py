"""Chooses which tokens of a step each rank of a context-parallel worker computes. Pure.

A token attends to all tokens before it, so the end of a prompt costs more than its beginning. Each
row is therefore cut into twice as many runs as there are ranks. A rank takes one run from the front
and its counterpart from the back (Dubey et al., The Llama 3 Herd of Models, 2024, 3.3.2). This
divides both tokens and pairs of query and key evenly. A rank's tokens are two runs, which the
attention kernels accept. Striped Attention (Brandon et al., 2023) deals tokens one by one, which is
equally even. It needs that in a ring, where keys arrive gradually, and would need a mask of its own
here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.scheduling.plan import PlanRow

MIN_TOKENS = 32
"""Minimum number of tokens per rank for which a step is divided among ranks. With fewer tokens, the
exchange of KV at each layer costs more time than the division saves."""


@dataclass(frozen=True, slots=True)
class ContextShard:
    """The part of a step's rows that one rank of a context-parallel worker computes."""

    rows: tuple[PlanRow, ...]
    """This rank's pieces of the step's rows. Each piece is a row with the block table of the whole
    row."""
    tokens: tuple[int, ...]
    """Indexes in the step of the tokens in ``rows``, in the same order."""


def is_split(rows: Sequence[PlanRow], ranks: int) -> bool:
    """Whether a step has enough tokens to divide it among ranks; otherwise rank 0 computes it.

    Rows that are too short to give every rank a part do not count.
    """
    return sum(row.count for row in rows if row.count >= 2 * ranks) >= ranks * MIN_TOKENS


def shards_of(rows: Sequence[PlanRow], ranks: int) -> list[ContextShard]:
    """Divide a step's rows among the ranks; returns one shard for each. Rank 0 gets the last token
    of every row, from which the next token is sampled."""
    runs: list[list[PlanRow]] = [[] for _ in range(ranks)]
    tokens: list[list[int]] = [[] for _ in range(ranks)]
    first = 0
    for row in rows:
        for rank in range(ranks):
            for run in _runs(row.count, rank, ranks):
                runs[rank].append(
                    replace(row, start=row.start + run.start, count=len(run), sample=False)
                )
                tokens[rank].extend(range(first + run.start, first + run.stop))
        first += row.count
    return [ContextShard(tuple(own), tuple(named)) for own, named in zip(runs, tokens, strict=True)]


def _runs(count: int, rank: int, ranks: int) -> list[range]:
    """Choose a rank's part of a row with ``count`` tokens: at most two ranges of consecutive
    tokens, none of them empty."""
    pieces = 2 * ranks
    front, back = (
        range(number * count // pieces, (number + 1) * count // pieces)
        for number in (rank, pieces - 1 - rank)
    )
    if front.stop == back.start:
        front, back = range(front.start, back.stop), range(0)
    return [run for run in (front, back) if run]
