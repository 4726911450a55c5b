"""Prompt lookup, against a plain search."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.speculation.speculation import NgramDrafter


def longest_suffix(tokens: list[int]) -> tuple[int, int]:
    """Where the longest suffix ended before, up to 15 tokens of it, the latest; and its length."""
    for length in range(min(15, len(tokens) - 1), 0, -1):
        suffix = tokens[-length:]
        for end in range(len(tokens) - 2, length - 2, -1):
            if tokens[end - length + 1 : end + 1] == suffix:
                return end, length
    return -1, 0


def continued(tokens: list[int], end: int, count: int) -> list[int]:
    whole = list(tokens)
    for place in range(count):
        whole.append(whole[end + 1 + place])
    return whole[len(tokens) :]


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.lists(st.integers(0, 2), max_size=40), st.integers(1, 8), st.integers(1, 5))
def test_the_longest_match_is_continued(tokens: list[int], most: int, step: int) -> None:
    """Asked again and again while the tokens come, as an engine asks.

    Of up to 8 earlier places; these sequences have more of them, so that the match may be shorter.
    """
    drafter = NgramDrafter()
    for count in range(step, len(tokens) + 1, step):
        known = tokens[:count]
        draft = drafter.propose(1, known, most)
        end, length = longest_suffix(known)
        if not length:
            assert draft is None
            continue
        assert draft is not None
        assert len(draft.token_ids) == most
        assert 1 <= draft.evidence <= length
        if length == 1:
            assert draft.token_ids == continued(known, end, most)


def test_the_longest_of_the_latest_places_wins() -> None:
    tokens = [7, 1, 2, 50, 8, 1, 2, 60, 9, 1, 2, 70, 8, 1, 2]
    draft = NgramDrafter().propose(1, tokens, 3)
    assert draft is not None
    assert (draft.token_ids, draft.evidence) == ([60, 9, 1], 3)


def test_the_latest_of_equal_places_wins() -> None:
    draft = NgramDrafter().propose(1, [1, 2, 50, 1, 2, 60, 1, 2], 1)
    assert draft is not None
    assert draft.token_ids == [60]


def test_a_repeated_passage_goes_on() -> None:
    draft = NgramDrafter().propose(1, [5, 1, 2, 3, 1, 2, 3], 8)
    assert draft is not None
    assert draft.token_ids == [1, 2, 3, 1, 2, 3, 1, 2]


@pytest.mark.parametrize("tokens", [[], [3], [1, 2, 3]])
def test_nothing_occurs_twice(tokens: list[int]) -> None:
    assert NgramDrafter().propose(1, tokens, 4) is None


def test_sequences_know_nothing_of_each_other() -> None:
    drafter = NgramDrafter()
    assert drafter.propose(1, [1, 2, 3, 1, 2], 1) is not None
    assert drafter.propose(2, [1, 2], 1) is None
    drafter.forget(1)
    drafter.forget(1)
    assert drafter.propose(1, [8, 9, 7], 1) is None


def test_a_long_sequence_is_read_once() -> None:
    """What a call costs does not grow with the sequence: each token is looked at once."""

    class Counted(list[int]):
        reads = 0

        def __getitem__(self, place):  # type: ignore[no-untyped-def]
            Counted.reads += 1
            return super().__getitem__(place)

    random = Random(0)
    tokens = Counted(random.randrange(50) for _ in range(20_000))
    drafter = NgramDrafter()
    drafter.propose(1, tokens, 5)
    Counted.reads = 0
    for _ in range(100):
        tokens.append(random.randrange(50))
        drafter.propose(1, tokens, 5)
    assert Counted.reads < 100 * 8 * 2 * 20
