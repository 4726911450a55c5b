"""The pace at which prompts are passed on."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.pace import LEAST_SHARE, MISSES, Pace


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), max_size=300))
def test_it_stays_within_its_bounds(answers: list[bool]) -> None:
    pace = Pace()
    for in_time in answers:
        pace.heard(in_time=in_time)
        assert LEAST_SHARE <= pace.share <= 1.0


def test_it_falls_with_misses_and_rises_without() -> None:
    pace = Pace()
    for _ in range(100):
        pace.heard(in_time=False)
    assert pace.share == LEAST_SHARE
    for _ in range(1000):
        pace.heard(in_time=True)
    assert pace.share == 1.0


def test_as_many_misses_as_are_allowed_leave_it_where_it_is() -> None:
    pace = Pace()
    for _ in range(10):
        pace.heard(in_time=False)
    before = pace.share
    for number in range(1000):
        pace.heard(in_time=number % round(1 / MISSES) != 0)
    assert abs(pace.share / before - 1) < 0.1
