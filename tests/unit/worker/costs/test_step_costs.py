"""Costs are recovered from times, and never negative."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from worker.costs.step_costs import StepCosts, fit

POSITIVE = st.floats(0.01, 100)
POINTS = [(float(x), float(x * y)) for x, y in product((1, 8, 32), (16, 100, 1000))]
quick = settings(max_examples=100, deadline=None, derandomize=True)


@quick
@given(POSITIVE, POSITIVE, st.floats(0.0001, 0.1))
def test_known_costs_are_recovered(a: float, b: float, c: float) -> None:
    found = fit(POINTS, [a + b * x + c * y for x, y in POINTS])
    assert found == pytest.approx((a, b, c), rel=1e-5)


@quick
@given(st.lists(st.tuples(st.integers(1, 99), st.integers(0, 9999), POSITIVE), max_size=9))
def test_no_cost_is_negative_and_none_is_better(rows: list[tuple[int, int, float]]) -> None:
    points = [(float(x), float(y)) for x, y, _ in rows]
    ms = [took for _, _, took in rows]
    found = fit(points, ms)
    assert min(found) >= 0

    def error(costs: tuple[float, float, float]) -> float:
        a, b, c = costs
        return sum(((a + b * x + c * y) / t - 1) ** 2 for (x, y), t in zip(points, ms, strict=True))

    for index, factor in product(range(3), (0.9, 1.1)):
        other = list(found)
        other[index] *= factor
        assert error(found) <= error((other[0], other[1], other[2])) + 1e-6


def test_a_term_that_would_be_negative_is_left_out() -> None:
    """Steps that get faster with their context: that is noise, and not to be continued."""
    a, b, c = fit([(1, 10), (1, 1000), (2, 10), (2, 1000)], [5.0, 4.0, 8.0, 7.0])
    assert c == 0
    assert a > 0
    assert b > 0


def test_nothing_measured_is_nothing_known() -> None:
    assert fit([], []) == (0.0, 0.0, 0.0)
    assert fit([(4.0, 0.0)], [8.0])[2] == 0


def test_costs_of_steps_and_chunks() -> None:
    costs = StepCosts((9.0, 2.0, 0.5), (1.0, 2.0, 0.25))
    assert costs.step_ms(3, 8) == 1 + 6 + 2
    # Each of 4 tokens attends to 10 before them and to 2 of their own, on average.
    assert costs.chunk_ms(4, 10) == 8 + 0.5 * 4 * 12
