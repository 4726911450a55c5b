"""The pace at which prompts are passed on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.pace import CALM_ANSWERS, CALM_S, LEAST_SHARE, MISSES, Pace


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), max_size=300))
def test_it_stays_within_its_bounds(answers: list[bool]) -> None:
    pace = Pace()
    for in_time in answers:
        pace.heard(in_time=in_time, now=0.0)
        assert LEAST_SHARE <= pace.share <= 1.0


def test_it_falls_with_misses_and_rises_without() -> None:
    pace = Pace()
    for _ in range(100):
        pace.heard(in_time=False, now=0.0)
    assert pace.share == LEAST_SHARE
    for _ in range(1000):
        pace.heard(in_time=True, now=0.0)
    assert pace.share == 1.0


def test_as_many_misses_as_are_allowed_leave_it_where_it_is() -> None:
    pace = Pace()
    for _ in range(10):
        pace.heard(in_time=False, now=0.0)
    before = pace.share
    for number in range(1000):
        pace.heard(in_time=number % round(1 / MISSES) != 0, now=0.0)
    assert abs(pace.share / before - 1) < 0.1


def slowed() -> Pace:
    pace = Pace()
    for _ in range(100):
        pace.heard(in_time=False, now=0.0)
    assert pace.share == LEAST_SHARE
    return pace


def test_answers_in_time_on_end_are_believed() -> None:
    """More of them than chance would have at the quantile."""
    pace = slowed()
    for _ in range(3 * CALM_ANSWERS):
        pace.heard(in_time=True, now=1.0)
    assert pace.share == 1.0


def test_it_is_forgotten_in_time_where_hardly_any_answer_ends() -> None:
    pace = slowed()
    pace.look(CALM_S)
    assert pace.share == LEAST_SHARE
    pace.look(2 * CALM_S)
    assert LEAST_SHARE < pace.share < 0.8
    for second in range(60, 200, 10):
        pace.look(float(second))
    assert pace.share > 0.99
    other = slowed()
    other.look(190.0)
    # Whether it is looked at once or often.
    assert abs(other.share - pace.share) < 1e-9


def test_misses_now_and_then_keep_it_low() -> None:
    pace = slowed()
    for number in range(1000):
        pace.heard(in_time=number % 4 != 0, now=number / 10)
    assert pace.share < 1.02 * LEAST_SHARE
