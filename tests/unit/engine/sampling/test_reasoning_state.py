"""Where a sequence stands in its reasoning: its end, natural and forced, and the grammar behind."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.grammar import Grammar
from baton.reasoning import ReasoningSpan
from engine.sampling.grammar_state import GrammarState, masks_of, unpack
from engine.sampling.reasoning_state import ReasoningState
from tests.support.baton.grammar_tools import (
    allowed_in,
    encode,
    end_id,
    regex,
    small_grammars,
    vocab_size,
)

A, B, C, EOS = *encode("a"), *encode("b"), *encode("c"), end_id()
OPEN, CLOSE, FINAL = 0, 40, 41
"""Tokens that no text here has."""
ANY = set(range(vocab_size()))
OPENED = ReasoningSpan(ends=((CLOSE,),), budget=3, forced=(CLOSE,))
SELF = ReasoningSpan(ends=((CLOSE,),), start=(OPEN,), budget=3, forced=(CLOSE,))
LONG = ReasoningSpan(ends=((CLOSE, FINAL),), budget=3, forced=(B, CLOSE, FINAL))


def state_of(
    span: ReasoningSpan, grammar: Grammar | None = None, min_tokens: int = 0
) -> ReasoningState:
    behind = None
    if grammar is not None:
        matcher = small_grammars().matcher(grammar)
        behind = GrammarState(matcher, vocab_size(), stop_ids=[EOS], min_tokens=min_tokens)
    return ReasoningState(span, vocab_size(), stop_ids=[EOS], grammar=behind)


def masks(state: ReasoningState, draft: Sequence[int]) -> list[set[int]]:
    rows = masks_of(state, draft)
    return [set(unpack(row, vocab_size()).nonzero()[0].tolist()) for row in rows]


def test_behind_the_budget_the_end_is_forced() -> None:
    state = state_of(OPENED)
    state.advance([A, B])
    assert allowed_in(state) == ANY
    state.advance([A])
    assert allowed_in(state) == {CLOSE}
    state.advance([CLOSE])
    assert state.is_free
    assert allowed_in(state) == ANY


def test_an_end_within_the_budget_frees_the_answer() -> None:
    state = state_of(OPENED)
    state.advance([A, CLOSE])
    assert state.is_free
    state.advance([A, B, C, A])
    assert allowed_in(state) == ANY
    assert state.length == 6


def test_a_budget_of_nothing_forces_the_end_at_once() -> None:
    state = state_of(ReasoningSpan(ends=((CLOSE,),), budget=0, forced=(CLOSE,)))
    assert allowed_in(state) == {CLOSE}


def test_the_budget_counts_from_behind_the_start() -> None:
    state = state_of(SELF)
    assert allowed_in(state) == ANY
    state.advance([OPEN, A, A])
    assert allowed_in(state) == ANY
    state.advance([A])
    assert allowed_in(state) == {CLOSE}


def test_an_answer_that_does_not_begin_with_the_start_has_no_reasoning() -> None:
    state = state_of(SELF)
    state.advance([A])
    assert state.is_free
    state.advance([A, A, A])
    assert allowed_in(state) == ANY


def test_a_run_that_the_model_has_begun_is_only_completed() -> None:
    """Behind the budget: of a forced run of three tokens the model has drawn the first two."""
    state = state_of(LONG)
    state.advance([A, B, CLOSE])
    assert allowed_in(state) == {FINAL}
    other = state_of(LONG)
    other.advance([A, A, A])
    assert masks(other, [B, CLOSE, FINAL]) == [{B}, {CLOSE}, {FINAL}, ANY]
    # An end run counts wherever it is.
    third = state_of(LONG)
    third.advance([CLOSE, FINAL])
    assert third.is_free


def test_the_grammar_begins_behind_the_reasoning() -> None:
    state = state_of(OPENED, regex("ab"))
    # An answer that is to match a grammar does not end in its reasoning.
    assert allowed_in(state) == ANY - {EOS}
    drafted = masks(state, [C, CLOSE, A, B])
    assert drafted[1] == ANY - {EOS}
    assert A in drafted[2]
    assert C not in drafted[2]
    assert drafted[3:] == [{B}, {EOS}]
    state.advance([C, CLOSE])
    assert C not in allowed_in(state)
    state.advance([A])
    assert allowed_in(state) == {B}
    state.advance([B])
    assert allowed_in(state) == {EOS}
    assert not state.is_free


def test_a_model_that_opens_its_reasoning_itself_may_answer_at_once() -> None:
    state = state_of(SELF, regex("ab"))
    first = allowed_in(state)
    assert OPEN in first
    assert A in first
    assert C not in first
    state.advance([A])
    assert allowed_in(state) == {B}
    reasoning = state_of(SELF, regex("ab"))
    reasoning.advance([OPEN, C, CLOSE, A])
    assert allowed_in(reasoning) == {B}


def test_a_start_of_several_tokens_is_completed_before_a_grammar() -> None:
    span = ReasoningSpan(ends=((CLOSE,),), start=(OPEN, FINAL), budget=3, forced=(CLOSE,))
    state = state_of(span, regex("ab"))
    state.advance([OPEN])
    assert allowed_in(state) == {FINAL}
    state.advance([FINAL])
    assert allowed_in(state) == ANY - {EOS}


def test_min_tokens_count_the_reasoning() -> None:
    state = state_of(OPENED, regex("a*"), min_tokens=4)
    state.advance([C, CLOSE, A])
    assert EOS not in allowed_in(state)
    state.advance([A])
    assert EOS in allowed_in(state)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([OPENED, SELF, LONG]),
    st.sampled_from([None, regex("(ab|ba|c){2,9}")]),
)
def test_any_walk_can_be_drafted_taken_back_and_walked_again(
    seed: int, span: ReasoningSpan, grammar: Grammar | None
) -> None:
    """Masks of drafts are those met step by step, also behind rollbacks of any length."""
    chance = random.Random(seed)
    state = state_of(span, grammar)
    walked: list[int] = []
    for _ in range(20):
        allowed = allowed_in(state)
        likely = sorted(allowed & {A, B, C, OPEN, CLOSE, FINAL, EOS})
        token = chance.choice(likely)
        state.advance([token])
        walked.append(token)
        if chance.random() < 0.3:
            count = chance.randint(0, len(walked))
            state.rollback(count)
            del walked[len(walked) - count :]
    twin = state_of(span, grammar)
    rows = masks(twin, walked)
    for place, token in enumerate(walked):
        assert rows[place] == allowed_in(twin)
        twin.advance([token])
    assert rows[-1] == allowed_in(state)
    assert twin.length == state.length == len(walked)


@pytest.mark.parametrize("cut", range(8))
def test_a_moved_answer_stands_where_it_stood(cut: int) -> None:
    tokens = [OPEN, A, A, A, CLOSE, A, B, EOS]
    whole = state_of(SELF, regex("ab"))
    for token in tokens[:cut]:
        whole.advance([token])
    moved = state_of(SELF, regex("ab"))
    moved.advance(tokens[:cut])
    assert allowed_in(moved) == allowed_in(whole)
    assert tokens[cut] in allowed_in(moved)
