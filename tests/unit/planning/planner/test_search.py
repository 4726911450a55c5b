"""The search finds what trying everything finds, with fewer looks."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.planner.cluster_kind import Counts
from planning.planner.search import Monotone, best_split, cheapest

_MOST = 24


@st.composite
def staircases(draw: st.DrawFn) -> list[int]:
    """Of each number of prefill workers the fewest decode workers that will do; never rising."""
    steps = draw(st.lists(st.integers(1, _MOST + 4), min_size=_MOST, max_size=_MOST))
    return sorted(steps, reverse=True)


def _meets(staircase: list[int], asked: list[Counts]) -> Callable[[Counts], bool]:
    def meets(counts: Counts) -> bool:
        asked.append(counts)
        place = min(counts.prefill, _MOST) - 1
        return counts.decode >= staircase[place]

    return meets


@given(
    staircases(),
    st.tuples(st.integers(1, 8), st.integers(1, 8)),
    st.tuples(st.integers(1, 6), st.integers(1, 6)),
    st.integers(2, _MOST),
)
def test_it_finds_the_cheapest(
    staircase: list[int], prices: tuple[int, int], floor: tuple[int, int], budget: int
) -> None:
    asked: list[Counts] = []
    meets = _meets(staircase, asked)

    def price(counts: Counts) -> float:
        return counts.prefill * prices[0] + counts.decode * prices[1]

    def allows(counts: Counts) -> bool:
        return sum(counts) <= budget

    found = cheapest(meets, price, allows, Counts(*floor))
    assert len(asked) == len(set(asked))
    every = [
        price(counts)
        for prefill in range(floor[0], budget)
        for decode in range(floor[1], budget)
        if allows(counts := Counts(prefill, decode)) and meets(counts)
    ]
    if found is None:
        assert not every
    else:
        assert allows(found)
        assert meets(found)
        assert price(found) == min(every)


def test_a_good_floor_needs_few_looks() -> None:
    asked: list[Counts] = []

    def meets(counts: Counts) -> bool:
        asked.append(counts)
        return counts.prefill >= 21 and counts.decode >= 11

    found = cheapest(meets, sum, lambda one: sum(one) <= 64, Counts(20, 10))
    assert found == (21, 11)
    assert len(asked) <= 10


def test_answers_that_follow_are_not_asked_for() -> None:
    asked: list[Counts] = []

    def meets(counts: Counts) -> bool:
        asked.append(counts)
        return sum(counts) > 5

    is_met = Monotone(meets)
    assert is_met(Counts(3, 3))
    assert is_met(Counts(4, 3))
    assert not is_met(Counts(2, 2))
    assert not is_met(Counts(1, 2))
    assert asked == [(3, 3), (2, 2)]


@pytest.mark.parametrize("summit", [1, 2, 7, 15, 30, 31])
@pytest.mark.parametrize("start", [1, 9, 31, 80])
def test_it_climbs_to_the_best_split(summit: int, start: int) -> None:
    def value(counts: Counts) -> float:
        return -abs(counts.prefill - summit)

    found = best_split(value, lambda one: sum(one) <= 32, Counts(start, 3))
    assert found == (summit, 32 - summit)


def test_a_budget_may_be_too_small_for_two() -> None:
    assert best_split(sum, lambda one: sum(one) < 2, Counts(1, 1)) is None
    assert cheapest(lambda _: True, sum, lambda _: False, Counts(1, 1)) is None
