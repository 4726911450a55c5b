"""The policy: which pair of workers takes a prompt."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import Unavailable
from router.policy import Candidate, choose

IDLE = Candidate("idle", max_sequences=8, available_blocks=100)


def worker(name: str, **fields: int) -> Candidate:
    return replace(IDLE, incarnation=name, **fields)


CANDIDATES = st.builds(
    Candidate,
    incarnation=st.text("abcdef", min_size=1, max_size=4),
    queued_tokens=st.integers(0, 5000),
    sequences=st.integers(0, 20),
    max_sequences=st.integers(1, 16),
    available_blocks=st.integers(0, 200),
    held_blocks=st.integers(0, 40),
)
POOLS = st.lists(CANDIDATES, min_size=1, max_size=5, unique_by=lambda c: c.incarnation)


@pytest.mark.parametrize(
    ("prefill", "decode", "named"), [([], [IDLE], "prefill"), ([IDLE], [], "decode")]
)
def test_a_pool_without_workers_is_named(
    prefill: list[Candidate], decode: list[Candidate], named: str
) -> None:
    with pytest.raises(Unavailable, match=f"no {named} worker is ready") as caught:
        choose(10, 16, prefill, decode)
    assert caught.value.retry_after


def test_the_shortest_queue_computes_the_prompt() -> None:
    decision = choose(
        100, 16, [worker("a", queued_tokens=50), worker("b"), worker("c", queued_tokens=7)], [IDLE]
    )
    assert (decision.prefill, decision.uncached_tokens) == ("b", 100)
    assert decision.reason == "least_wait"


def test_a_cached_prefix_outweighs_a_queue_shorter_by_less() -> None:
    holder = worker("a", queued_tokens=50, held_blocks=4)
    decision = choose(100, 16, [holder, worker("b")], [IDLE])
    assert (decision.prefill, decision.uncached_tokens) == ("a", 36)
    assert decision.reason == "prefix"
    decision = choose(100, 16, [replace(holder, queued_tokens=65), worker("b")], [IDLE])
    assert (decision.prefill, decision.reason) == ("b", "least_wait")


def test_the_last_token_is_computed_even_if_all_is_cached() -> None:
    assert choose(64, 16, [worker("a", held_blocks=4)], [IDLE]).uncached_tokens == 1


def test_room_comes_before_an_emptier_batch() -> None:
    small = worker("a", available_blocks=6)
    busy = worker("b", sequences=4)
    full = worker("c", sequences=8, available_blocks=1000)
    assert choose(100, 16, [IDLE], [small, busy, full]).decode == "b"
    assert choose(96, 16, [IDLE], [small, busy, full]).decode == "a"


def test_held_blocks_need_no_room() -> None:
    holder = worker("a", available_blocks=3, held_blocks=4)
    assert choose(100, 16, [IDLE], [holder, worker("b", sequences=1)]).decode == "a"


def test_of_two_alike_the_one_with_the_blocks_decodes() -> None:
    assert choose(100, 16, [IDLE], [worker("a"), worker("b", held_blocks=2)]).decode == "b"


@settings(max_examples=200, deadline=None, derandomize=True)
@given(st.integers(1, 3000), st.sampled_from((1, 16, 64)), POOLS, POOLS)
def test_it_always_decides_and_the_order_does_not_matter(
    tokens: int, size: int, prefill: list[Candidate], decode: list[Candidate]
) -> None:
    decision = choose(tokens, size, prefill, decode)
    assert decision == choose(tokens, size, prefill[::-1], decode[::-1])
    (source,) = [c for c in prefill if c.incarnation == decision.prefill]
    assert decision.decode in {c.incarnation for c in decode}
    assert 1 <= decision.uncached_tokens <= tokens
    for other in prefill:
        uncached = max(1, tokens - other.held_blocks * size)
        wait = source.queued_tokens + decision.uncached_tokens
        assert wait <= other.queued_tokens + uncached
    most = max(min(c.held_blocks, (tokens - 1) // size) for c in (*prefill, *decode))
    assert decision.holder_blocks == (most if most > source.held_blocks else 0)
    holding = [c.incarnation for c in (*prefill, *decode) if c.held_blocks >= most]
    assert decision.holder in (holding if decision.holder_blocks else [""])


def test_whoever_holds_more_than_the_prefill_worker_is_named() -> None:
    prefill = [worker("a", held_blocks=2), worker("b", held_blocks=3, queued_tokens=500)]
    decode = [worker("c", held_blocks=5), worker("d", held_blocks=4)]
    decision = choose(100, 16, prefill, decode)
    assert (decision.prefill, decision.holder, decision.holder_blocks) == ("a", "c", 5)
    decision = choose(100, 16, prefill, decode[1:])
    assert (decision.prefill, decision.holder, decision.holder_blocks) == ("a", "d", 4)
    decision = choose(100, 16, prefill, [IDLE])
    assert (decision.prefill, decision.holder, decision.holder_blocks) == ("a", "b", 3)


def test_a_holder_of_no_more_is_not_named() -> None:
    decision = choose(100, 16, [worker("a", held_blocks=2)], [worker("c", held_blocks=2)])
    assert (decision.holder, decision.holder_blocks) == ("", 0)


def test_what_a_holder_has_beyond_the_last_token_counts_for_nothing() -> None:
    decode = [worker("c", held_blocks=4)]
    decision = choose(64, 16, [worker("a", held_blocks=3)], decode)
    assert (decision.holder, decision.holder_blocks) == ("", 0)
    assert choose(65, 16, [worker("a", held_blocks=3)], decode).holder == "c"


def test_of_equal_holders_the_idlest_is_named() -> None:
    decode = [worker("c", held_blocks=4, sequences=2), worker("d", held_blocks=9, sequences=1)]
    decision = choose(70, 16, [worker("a")], decode)
    assert (decision.holder, decision.holder_blocks) == ("d", 4)


def test_among_equals_the_least_used_is_taken() -> None:
    prefill = [worker("a", placed=3), worker("b", placed=2)]
    decode = [worker("c", placed=5), worker("d", placed=4)]
    decision = choose(10, 16, prefill, decode)
    assert (decision.prefill, decision.decode) == ("b", "d")
