"""Whether more work arrives than the cluster can do."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admission.overload import (
    MAX_CALM_S,
    MEMORY_S,
    MIN_SHARE,
    MISSES,
    SLACK_S,
    SUSTAINABLE,
    Overload,
    PrefillPacer,
)


def test_each_choice_of_a_request_counts_as_an_answer() -> None:
    """Decode workers end 10 answers a second; 10 requests of one come in the memory's time."""
    for choices, lasts in ((1, False), (8, True)):
        overload = Overload()
        for _ in range(10):
            overload.came(0.0, choices, 0.0)
        assert overload.lasts(1.0, 10.0, 0.0) is lasts


def test_one_prompt_of_more_than_four_seconds_of_work_per_worker_is_overload() -> None:
    for work_s, lasts in ((3.9, False), (4.1, True)):
        overload = Overload()
        overload.came(2 * work_s, 1, 0.0)
        assert overload.lasts(2.0, math.inf, 0.0) is lasts
    assert SUSTAINABLE * MEMORY_S == 4.0


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.booleans(), max_size=300))
def test_it_stays_within_its_bounds(answers: list[bool]) -> None:
    pace = PrefillPacer()
    for in_time in answers:
        pace.observe(in_time=in_time, took_s=1.0, now=0.0)
        assert MIN_SHARE <= pace.share <= 1.0


def slowed(for_s: float = 100.0) -> PrefillPacer:
    """Answers were slow for some seconds, up to the moment 0."""
    pace = PrefillPacer()
    for number in range(100):
        pace.observe(in_time=False, took_s=0.0, now=for_s * (number / 99 - 1))
    assert pace.share == MIN_SHARE
    return pace


def test_it_rises_without_misses() -> None:
    pace = slowed()
    for _ in range(1000):
        pace.observe(in_time=True, took_s=1.0, now=0.0)
    assert pace.share == 1.0


def test_as_many_misses_as_are_allowed_leave_it_where_it_is() -> None:
    pace = slowed()
    for _ in range(50):
        pace.observe(in_time=True, took_s=1.0, now=0.0)
    before = pace.share
    for number in range(1000):
        in_time = number % round(1 / MISSES) != 0
        pace.observe(in_time=in_time, took_s=1.0, now=0.0)
    assert abs(pace.share / before - 1) < 0.1


@settings(max_examples=200, deadline=None, derandomize=True)
@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.booleans(), st.floats(0.0, 20.0)), max_size=100),
    st.lists(st.floats(0.0, 1.0), max_size=5),
)
def test_nothing_is_held_back_for_longer_than_the_disturbance_lasted(
    answers: list[tuple[float, bool, float]], looks: list[float]
) -> None:
    """It lasts from when the first slow answer began to when the last one ended."""
    pace, now, since, until = PrefillPacer(), 0.0, None, 0.0
    for pause_s, in_time, took_s in answers:
        now += pause_s
        pace.observe(in_time=in_time, took_s=took_s, now=now)
        if not in_time:
            since = now - took_s if since is None else min(since, now - took_s)
            until = now
    lasted_s = 0.0 if since is None else until - since
    for share in sorted(looks):
        pace.look(max(now, until + share * lasted_s))
        assert MIN_SHARE <= pace.share <= 1.0
    pace.look(max(now, until + lasted_s))
    assert pace.share == 1.0


def test_it_is_gone_after_some_time_however_long_it_lasted() -> None:
    pace = slowed(1000.0)
    pace.look(MAX_CALM_S / 2)
    assert pace.share == MIN_SHARE
    pace.look(0.75 * MAX_CALM_S)
    assert pace.share == pytest.approx(MIN_SHARE**0.5)
    often = slowed(1000.0)
    for tenth in range(1, 10 * int(MAX_CALM_S)):
        often.look(tenth / 10)
        if tenth == 7.5 * MAX_CALM_S:
            assert often.share == pytest.approx(pace.share)
    pace.look(MAX_CALM_S)
    assert pace.share == 1.0


def test_misses_now_and_then_keep_it_low() -> None:
    pace = slowed()
    for number in range(1000):
        pace.observe(in_time=number % 4 != 0, took_s=1.0, now=number / 10)
    assert pace.share < 1.05 * MIN_SHARE


def test_a_miss_soon_after_prompts_are_held_back_no_more_belongs_to_the_same_disturbance() -> None:
    pace = slowed(10.0)
    pace.look(15.0)
    assert pace.share == 1.0
    pace.observe(in_time=False, took_s=1.0, now=16.0)
    pace.look(28.0)
    assert pace.share < 1.0
    pace.look(16.0 + 26.0)
    assert pace.share == 1.0


def test_a_last_miss_before_an_idle_time_begins_no_disturbance_that_lasts_through_it() -> None:
    pace = PrefillPacer()
    pace.observe(in_time=False, took_s=1.0, now=0.0)
    pace.look(5.0)
    pace.forget()
    for second in range(3600, 3603):
        pace.observe(in_time=False, took_s=1.0, now=float(second))
    assert pace.share < 1.0
    pace.look(3605.1)
    assert pace.share == 1.0


@pytest.mark.parametrize("workers", [1, 4])
def test_each_worker_rests_in_proportion_to_its_prompts(workers: int) -> None:
    pace = slowed()
    pace.served_by(workers)
    for _ in range(workers):
        assert pace.wait_s((), 0.0) == 0.0
        pace.sent(2.0, 0.0)
    assert pace.wait_s((), 0.0) == pytest.approx(2.0 / MIN_SHARE - SLACK_S)
    assert pace.wait_s([0.5] * workers, 0.0) == pytest.approx(2.5 / MIN_SHARE - SLACK_S)


def test_a_worker_that_comes_has_not_to_rest_and_others_go_with_their_rest() -> None:
    pace = slowed()
    pace.sent(2.0, 0.0)
    waits_s = pace.wait_s((), 0.0)
    pace.served_by(2)
    assert pace.wait_s((), 0.0) == 0.0
    pace.served_by(1)
    assert pace.wait_s((), 0.0) == waits_s


def test_at_full_pace_nothing_rests() -> None:
    pace = slowed()
    pace.sent(20.0, 0.0)
    pace.look(2 * MAX_CALM_S)
    assert pace.wait_s((1.0,), 2 * MAX_CALM_S) == 0.0
