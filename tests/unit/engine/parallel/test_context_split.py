"""How a step's tokens are divided among ranks that have all weights each."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.parallel.context_split import MIN_TOKENS, ContextShard, is_split, shards_of
from engine.scheduling.plan import PlanRow

RANKS = st.integers(2, 8)
SPANS = st.lists(st.tuples(st.integers(0, 5000), st.integers(1, 300)), min_size=1, max_size=4)


def rows_of(spans: list[tuple[int, int]]) -> tuple[PlanRow, ...]:
    return tuple(
        PlanRow(number, start, count, (number,), sample=True)
        for number, (start, count) in enumerate(spans)
    )


def positions(rows: tuple[PlanRow, ...]) -> list[tuple[int, int]]:
    """Sequence and position of each token."""
    return [(row.sequence_id, row.start + n) for row in rows for n in range(row.count)]


def keys(shard: ContextShard) -> int:
    """Pairs of a query and a key that the shard attends to."""
    return sum(position + 1 for _, position in positions(shard.rows))


@given(SPANS, RANKS)
def test_every_token_lies_on_one_rank(spans: list[tuple[int, int]], ranks: int) -> None:
    rows = rows_of(spans)
    all_tokens = positions(rows)
    shards = shards_of(rows, ranks)
    found = [token for shard in shards for token in shard.tokens]
    assert sorted(found) == list(range(len(all_tokens)))
    for shard in shards:
        assert positions(shard.rows) == [all_tokens[token] for token in shard.tokens]
        assert all(row.count > 0 and row.block_table == (row.sequence_id,) for row in shard.rows)


@given(SPANS, RANKS)
def test_rank_0_has_the_last_token_of_every_row(spans: list[tuple[int, int]], ranks: int) -> None:
    rows = rows_of(spans)
    lasts = [sum(row.count for row in rows[: n + 1]) - 1 for n in range(len(rows))]
    assert set(lasts) <= set(shards_of(rows, ranks)[0].tokens)


@given(SPANS, RANKS)
def test_tokens_and_pairs_of_query_and_key_are_divided_evenly(
    spans: list[tuple[int, int]], ranks: int
) -> None:
    shards = shards_of(rows_of(spans), ranks)
    counts = [len(shard.tokens) for shard in shards]
    work = [keys(shard) for shard in shards]
    # A rank has two runs of each row; the ends of a run are rounded to whole tokens.
    assert max(counts) - min(counts) <= 2 * len(spans)
    assert max(work) - min(work) <= sum(2 * (start + count) for start, count in spans)


@given(st.integers(0, 5000), st.integers(1, 50), RANKS)
def test_what_can_be_divided_evenly_is(start: int, run: int, ranks: int) -> None:
    shards = shards_of(rows_of([(start, 2 * ranks * run)]), ranks)
    assert {len(shard.tokens) for shard in shards} == {2 * run}
    assert len({keys(shard) for shard in shards}) == 1


@given(SPANS, RANKS)
def test_no_rank_is_idle_in_a_step_that_is_divided(
    spans: list[tuple[int, int]], ranks: int
) -> None:
    rows = rows_of(spans)
    if is_split(rows, ranks):
        assert all(shard.tokens for shard in shards_of(rows, ranks))


@pytest.mark.parametrize("ranks", [2, 4])
def test_short_steps_are_not_divided(ranks: int) -> None:
    least = ranks * MIN_TOKENS
    assert is_split(rows_of([(70, least)]), ranks)
    assert not is_split(rows_of([(70, least - 1)]), ranks)
    # Many sequences that decode in a step with a short chunk.
    assert not is_split(rows_of([(70, least - 1)] + [(9, 1)] * least), ranks)
