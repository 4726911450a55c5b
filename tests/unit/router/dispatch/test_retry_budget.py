"""How many requests may be moved."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.dispatch.retry_budget import RetryBudget


def test_a_burst_then_a_fraction_of_the_traffic() -> None:
    budget = RetryBudget(0.2, 3, 0.0)
    assert [budget.take(0.0) for _ in range(4)] == [True, True, True, False]
    for _ in range(5):
        budget.admitted()
    assert [budget.take(9.0) for _ in range(2)] == [True, False]


def test_time_fills_it_up_to_the_burst() -> None:
    budget = RetryBudget(0.0, 2, 0.5)
    assert [budget.take(10.0) for _ in range(3)] == [True, True, False]
    assert not budget.take(11.0)
    assert budget.take(12.0)
    assert [budget.take(1000.0) for _ in range(3)] == [True, True, False]
    assert not budget.take(5.0), "a clock that goes back gives nothing"


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    st.floats(0, 1),
    st.integers(1, 20),
    st.lists(st.one_of(st.just(None), st.floats(0, 5)), max_size=200),
)
def test_never_more_than_was_earned(ratio: float, burst: int, events: list[float | None]) -> None:
    """None is a request, a number the seconds until the next move is wanted."""
    budget = RetryBudget(ratio, burst, 0.1)
    now = taken = requests = 0.0
    for event in events:
        if event is None:
            requests += 1
            budget.admitted()
        else:
            now += event
            taken += budget.take(now)
        assert 0.0 <= budget.level <= burst
    assert taken <= burst + ratio * requests + 0.1 * now + 1e-6
