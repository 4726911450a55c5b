"""How heads are shared by ranks: every head somewhere, every query with what it attends to."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.head_share import kv_heads_of, query_heads_of, ranks_of

RANKS = st.integers(1, 40)
HEADS = st.integers(1, 40)


@given(RANKS, HEADS)
def test_every_kv_head_is_held_and_shares_differ_by_one_at_most(ranks: int, heads: int) -> None:
    held = [kv_heads_of(rank, ranks, heads) for rank in range(ranks)]
    assert {head for share in held for head in share} == set(range(heads))
    sizes = {len(share) for share in held}
    assert max(sizes) - min(sizes) <= 1
    assert min(sizes) >= 1
    if ranks <= heads:
        assert [head for share in held for head in share] == list(range(heads))
    else:
        assert sizes == {1}
        assert [share.start for share in held] == sorted(share.start for share in held)


@given(RANKS, HEADS)
def test_the_ranks_of_a_head_are_those_that_hold_it(ranks: int, heads: int) -> None:
    for head in range(heads):
        expected = [rank for rank in range(ranks) if head in kv_heads_of(rank, ranks, heads)]
        assert list(ranks_of(head, ranks, heads)) == expected
    copies = {len(ranks_of(head, ranks, heads)) for head in range(heads)}
    assert max(copies) - min(copies) <= 1


@given(RANKS, HEADS, st.integers(1, 16))
def test_every_query_head_is_computed_once_where_its_keys_are(
    ranks: int, heads: int, group: int
) -> None:
    shares = [query_heads_of(rank, ranks, heads, heads * group) for rank in range(ranks)]
    assert [query for share in shares for query in share] == list(range(heads * group))
    for rank, share in enumerate(shares):
        assert {query // group for query in share} <= set(kv_heads_of(rank, ranks, heads))
    if ranks > heads:
        for head in range(heads):
            sizes = {len(shares[rank]) for rank in ranks_of(head, ranks, heads)}
            assert max(sizes) - min(sizes) <= 1


@pytest.mark.parametrize(
    ("ranks", "kv_heads", "query_heads", "kv", "queries"),
    [
        (1, 3, 9, [[0, 1, 2]], [9]),
        (2, 3, 9, [[0], [1, 2]], [3, 6]),
        (4, 3, 9, [[0], [0], [1], [2]], [1, 2, 3, 3]),
        (4, 8, 32, [[0, 1], [2, 3], [4, 5], [6, 7]], [8, 8, 8, 8]),
        (4, 2, 8, [[0], [0], [1], [1]], [2, 2, 2, 2]),
        (2, 1, 1, [[0], [0]], [0, 1]),
    ],
)
def test_shares(
    ranks: int, kv_heads: int, query_heads: int, kv: list[list[int]], queries: list[int]
) -> None:
    held = [list(kv_heads_of(rank, ranks, kv_heads)) for rank in range(ranks)]
    assert held == kv
    shares = [query_heads_of(rank, ranks, kv_heads, query_heads) for rank in range(ranks)]
    assert [len(share) for share in shares] == queries


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ValueError, match="no rank 2 of 2"):
        kv_heads_of(2, 2, 4)
    with pytest.raises(ValueError, match="no KV head 4 of 4"):
        ranks_of(4, 2, 4)
    with pytest.raises(ValueError, match="0 KV heads cannot be divided among 2 ranks"):
        kv_heads_of(0, 2, 0)
    with pytest.raises(ValueError, match="7 query heads cannot share 3"):
        query_heads_of(0, 1, 3, 7)
