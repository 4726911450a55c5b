"""Where a sequence stands in its grammar: masks, drafts, going back, and the end."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import GrammarFailed
from baton.grammar import Grammar, TokenMatcher
from engine.sampling.grammar_state import GrammarState, masks_of, pack, unpack
from tests.support.baton.grammar_tools import (
    allowed_in,
    encode,
    end_id,
    regex,
    schema,
    small_grammars,
    vocab_size,
)

A, B, C, EOS = *encode("a"), *encode("b"), *encode("c"), end_id()
SCHEMA = schema(
    json.dumps(
        {
            "type": "object",
            "properties": {
                "name": {"type": "string", "maxLength": 12},
                "kind": {"enum": ["one", "two"]},
                "tags": {"type": "array", "items": {"type": "integer"}, "maxItems": 3},
            },
            "required": ["name", "kind"],
            "additionalProperties": False,
        }
    )
)


def state_of(
    grammar: Grammar,
    *,
    stop_ids: Sequence[int] = (),
    min_tokens: int = 0,
    never: Sequence[int] = (),
) -> GrammarState:
    return GrammarState(
        small_grammars().matcher(grammar),
        vocab_size(),
        stop_ids=stop_ids,
        min_tokens=min_tokens,
        never=never,
    )


@given(st.lists(st.booleans(), min_size=1, max_size=100))
def test_masks_are_packed_from_the_lowest_bit_up(bits: list[bool]) -> None:
    mask = pack(np.array(bits))
    assert mask.nbytes == 4 * -(-len(bits) // 32)
    assert unpack(mask, len(bits)).tolist() == bits
    assert [bool(int(mask[n // 32]) >> n % 32 & 1) for n in range(len(bits))] == bits


def test_the_end_is_allowed_where_the_text_may_end() -> None:
    state = state_of(regex("ab?"))
    assert EOS not in allowed_in(state)
    state.advance([A])
    assert allowed_in(state) == {B, EOS}
    state.advance([B])
    assert allowed_in(state) == {EOS}


def test_what_a_grammar_does_not_allow_fails() -> None:
    state = state_of(regex("ab?"))
    with pytest.raises(GrammarFailed):
        state.advance([C])


@pytest.mark.parametrize("grammar", [regex("ab"), regex("ab(ab)*")])
def test_tokens_behind_the_end_are_counted_alone(grammar: Grammar) -> None:
    """Both where nothing may follow the text and where the model chose to end it."""
    state = state_of(grammar)
    state.advance([A, B, EOS, C, C])
    assert state.length == 5
    assert allowed_in(state) == {EOS}
    state.rollback(3)
    assert state.length == 2
    assert EOS in allowed_in(state)
    state.rollback(1)
    assert allowed_in(state) == {B}


def test_before_min_tokens_the_end_is_held_back_where_there_is_a_choice() -> None:
    state = state_of(regex("ab{0,2}"), stop_ids=[EOS], min_tokens=3)
    state.advance([A])
    assert allowed_in(state) == {B}
    state.advance([B, B])
    assert allowed_in(state) == {EOS}
    early = state_of(regex("a"), stop_ids=[EOS], min_tokens=3)
    early.advance([A])
    assert allowed_in(early) == {EOS}
    late = state_of(regex("ab*"), stop_ids=[EOS], min_tokens=2)
    late.advance([A])
    assert EOS not in allowed_in(late)
    late.advance([B])
    assert EOS in allowed_in(late)


def test_other_stop_tokens_are_held_back_too() -> None:
    state = state_of(regex("(a|b)*"), stop_ids=[EOS, B], min_tokens=1)
    assert B not in allowed_in(state)
    assert A in allowed_in(state)
    state.advance([A])
    assert {A, B, EOS} <= allowed_in(state)


def test_an_end_that_is_ignored_comes_where_nothing_else_may() -> None:
    state = state_of(regex("ab?"), never=[EOS])
    state.advance([A])
    assert allowed_in(state) == {B}
    state.advance([B])
    assert allowed_in(state) == {EOS}


def test_drafts_have_the_masks_of_their_places() -> None:
    state = state_of(regex("a(b|c)a"), stop_ids=[EOS], min_tokens=2)
    rows = masks_of(state, [A, C, A, EOS])
    found = [set(unpack(row, vocab_size()).nonzero()[0].tolist()) for row in rows]
    assert found[1:4] == [{B, C}, {A}, {EOS}]
    assert A in found[0]
    assert state.length == 0
    assert A in allowed_in(state)


def test_behind_a_wrong_draft_everything_is_allowed() -> None:
    state = state_of(regex("a(b|c)a"))
    rows = masks_of(state, [A, A, B])
    found = [unpack(row, vocab_size()) for row in rows]
    assert set(found[1].nonzero()[0].tolist()) == {B, C}
    assert found[2].all()
    assert found[3].all()
    assert state.length == 0
    state.advance([A, B, A, EOS])


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 2**32), st.sampled_from([SCHEMA, regex("(ab|ba|c){2,9}")]))
def test_any_walk_can_be_drafted_taken_back_and_walked_again(seed: int, grammar: Grammar) -> None:
    """Masks of drafts are those met step by step, also behind rollbacks of any length."""
    chance = random.Random(seed)
    state = state_of(grammar, stop_ids=[EOS], min_tokens=chance.choice((0, 3, 20)))
    walked: list[int] = []
    while state.length < 12:
        token = chance.choice(sorted(allowed_in(state)))
        state.advance([token])
        walked.append(token)
        if chance.random() < 0.3:
            count = chance.randint(0, len(walked))
            state.rollback(count)
            del walked[len(walked) - count :]
        if chance.random() < 0.05:
            break
    twin = state_of(grammar, stop_ids=[EOS], min_tokens=state._min_tokens)
    rows = masks_of(twin, walked)
    for place, token in enumerate(walked):
        assert (rows[place] == masks_of(twin)[0]).all()
        twin.advance([token])
    assert (rows[-1] == masks_of(state)[0]).all()
    assert twin.length == state.length == len(walked)


class BrokenMatcher:
    """Breaks at a step, as one does that would take too long."""

    def __init__(self, breaks_at: int) -> None:
        self._left = breaks_at

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        self._left -= 1

    def consume_token(self, sampled_token: int) -> bool:
        return not self.is_error()

    def rollback(self, num_tokens: int) -> bool:
        return not self.is_error()

    def is_stopped(self) -> bool:
        return self.is_error()

    def is_error(self) -> bool:
        return self._left <= 0

    def get_error(self) -> str:
        return "lexer error: too many states\n<non-verbose/>\nsecret"

    def deep_copy(self) -> TokenMatcher:
        return self


def test_a_matcher_that_breaks_is_one_clear_error() -> None:
    state = GrammarState(BrokenMatcher(2), vocab_size())
    masks_of(state)
    with pytest.raises(GrammarFailed, match=r"matcher failed: lexer error: too many states$"):
        masks_of(state)
    with pytest.raises(GrammarFailed):
        state.advance([A])
    with pytest.raises(GrammarFailed):
        masks_of(GrammarState(BrokenMatcher(2), vocab_size()), [A, B])
