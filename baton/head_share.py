"""Computes which heads of a model each rank of a tensor-parallel worker holds.

With H KV heads and k ranks:

- k <= H: rank r holds the KV heads [r*H//k, (r+1)*H//k), and the query heads of their groups. Ranks
  may differ by one KV head: of 3 heads on 2 ranks, one has 1 and the other 2.
- k > H: rank r holds the one KV head r*H//k. Several ranks hold the same one, and share the query
  heads of its group: contiguous runs, which differ by one at most.

Engine and handoff use this rule. Plain Python. All functions raise ValueError for impossible
arguments.
"""

from __future__ import annotations


def kv_heads_of(rank: int, ranks: int, kv_heads: int) -> range:
    """Return the model's KV heads that a rank holds: at least one."""
    _check(ranks, kv_heads)
    if not 0 <= rank < ranks:
        raise ValueError(f"there is no rank {rank} of {ranks}")
    first = rank * kv_heads // ranks
    return range(first, max(first + 1, (rank + 1) * kv_heads // ranks))


def ranks_of(kv_head: int, ranks: int, kv_heads: int) -> range:
    """Return the ranks that hold a KV head: one, unless there are more ranks than heads."""
    _check(ranks, kv_heads)
    if not 0 <= kv_head < kv_heads:
        raise ValueError(f"there is no KV head {kv_head} of {kv_heads}")
    last = ((kv_head + 1) * ranks - 1) // kv_heads
    first = -(-kv_head * ranks // kv_heads)
    return range(min(first, last), last + 1)


def query_heads_of(rank: int, ranks: int, kv_heads: int, query_heads: int) -> range:
    """Return the model's query heads that a rank computes. One rank computes each head.

    All KV heads that they attend to lie on the rank. Some ranks compute none where there are more
    ranks than query heads.
    """
    held = kv_heads_of(rank, ranks, kv_heads)
    group, rest = divmod(query_heads, kv_heads)
    if rest or group < 1:
        raise ValueError(f"{query_heads} query heads cannot share {kv_heads} KV heads evenly")
    if ranks <= kv_heads:
        return range(held.start * group, held.stop * group)
    holders = ranks_of(held.start, ranks, kv_heads)
    place, first = rank - holders.start, held.start * group
    return range(first + place * group // len(holders), first + (place + 1) * group // len(holders))


def _check(ranks: int, kv_heads: int) -> None:
    if min(ranks, kv_heads) < 1:
        raise ValueError(f"{kv_heads} KV heads cannot be divided among {ranks} ranks")
