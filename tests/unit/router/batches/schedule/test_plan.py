"""When batches run, so that they end in their windows."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.config.daily_hours import DailyHours
from router.batches.schedule.plan import (
    MARGIN,
    MIN_LINES,
    BatchSchedule,
    BatchWork,
    SpeedState,
    plan_batches,
)

HOUR_S = 3600.0
NIGHT = DailyHours.parse("22:00-06:00", "UTC")
MIDNIGHT = 1_764_028_800.0
NOON = MIDNIGHT + 12 * HOUR_S
SPEED = 100.0
"""Tokens per second."""


def work(hours: float, window_h: float, now: float = NOON, **changes: object) -> BatchWork:
    """A batch with ``hours`` of work left, in lines of 10 tokens."""
    left = round(hours * HOUR_S * SPEED / 10)
    made = BatchWork("a", "acme", now + window_h * HOUR_S, left + 10, 10, 100)
    return replace(made, **changes)  # type: ignore[arg-type] # names of its fields


def planned(
    *works: BatchWork, hours: DailyHours | None = NIGHT, now: float = NOON, **weights: float
) -> dict[str, BatchSchedule]:
    return plan_batches(works, SPEED, hours, weights, now)


def test_without_hours_batches_run_at_once() -> None:
    found = planned(work(2, 24), hours=None)["a"]
    assert found.state is SpeedState.FULL_SPEED
    assert found.lines_per_s == math.inf
    assert found.ends_at == pytest.approx(NOON + 2 * HOUR_S)
    assert found.late_lines == 0


def test_a_batch_that_fits_into_the_hours_waits_for_them() -> None:
    found = planned(work(6, 24))["a"]
    assert found.state is SpeedState.WAITING
    assert found.lines_per_s == 0
    assert found.starts_at == NOON + 10 * HOUR_S
    assert found.ends_at == pytest.approx(NOON + 16 * HOUR_S)


def test_within_the_hours_it_runs_at_full_speed() -> None:
    now = MIDNIGHT + 23 * HOUR_S
    found = planned(work(6, 24, now), now=now)["a"]
    assert found.state is SpeedState.FULL_SPEED
    assert found.ends_at == pytest.approx(now + 6 * HOUR_S)


def test_a_window_without_hours_is_kept_outside_of_them() -> None:
    # A window of four hours at noon: one hour of work, with the margin a third of the speed.
    found = planned(work(1, 4))["a"]
    assert found.state is SpeedState.PACED
    assert found.lines_per_s == pytest.approx(MARGIN * 1 / 4 * SPEED / 10)
    assert found.ends_at == pytest.approx(NOON + 4 / MARGIN * HOUR_S)


def test_what_the_hours_cannot_do_is_spread_over_the_rest() -> None:
    # 8 hours of night and 16 of day; 10 of work are 12.5 with the margin.
    found = planned(work(10, 24))["a"]
    assert found.state is SpeedState.PACED
    assert found.lines_per_s == pytest.approx((10 * MARGIN - 8) / 16 * SPEED / 10)
    assert found.late_lines == 0
    assert found.ends_at is not None
    assert found.ends_at < NOON + 24 * HOUR_S


def test_late_lines_are_said() -> None:
    found = planned(work(30, 24))["a"]
    assert found.state is SpeedState.FULL_SPEED
    assert found.late_lines == round(6 * HOUR_S * SPEED / 10)
    assert found.ends_at == NOON + 24 * HOUR_S
    # A window that has just enough time misses the margin, and no line.
    tight = planned(work(23, 24))["a"]
    assert (tight.state, tight.late_lines) == (SpeedState.FULL_SPEED, 0)


def test_what_is_due_first_comes_first() -> None:
    soon, later = work(1, 2, id="soon"), work(6, 24, id="later")
    found = planned(later, soon)
    assert found["soon"].state is SpeedState.PACED
    # Seven hours of work are 8.75 with the margin, and the night has 8: what "soon" does suffices.
    assert found["later"].state is SpeedState.WAITING
    alone = planned(later, work(3, 24, id="more"))
    assert (alone["later"].state, alone["more"].state) == (SpeedState.WAITING, SpeedState.PACED)


def test_tenants_share_the_speed_by_weight() -> None:
    one, other = work(10, 100, id="one"), work(10, 100, id="other", tenant="other")
    now = MIDNIGHT + 22 * HOUR_S
    found = planned(one, other, hours=None, now=now, acme=3.0)
    assert found["one"].ends_at == pytest.approx(now + 10 / 0.75 * HOUR_S)
    # The heavier one has ended before that: all of the work takes 20 hours.
    assert found["other"].ends_at == pytest.approx(now + 20 * HOUR_S)


def test_unknown_sizes_and_speeds_run_at_once() -> None:
    new = work(1, 24, done=MIN_LINES - 1)
    assert planned(new)["a"] == BatchSchedule(SpeedState.FULL_SPEED, math.inf)
    slow = plan_batches([work(1, 24)], None, NIGHT, {}, NOON)["a"]
    assert slow == BatchSchedule(SpeedState.FULL_SPEED, math.inf)
    # A short file is known as soon as all of it is done, and ends whatever the hour.
    ended = planned(work(1, 24, total=3, done=3))["a"]
    assert ended.state is SpeedState.FULL_SPEED
    assert planned() == {}


WORKS = st.lists(
    st.builds(
        BatchWork,
        id=st.uuids().map(str),
        tenant=st.sampled_from(["a", "b", "c"]),
        expires_at=st.integers(-3600, 30 * 86_400).map(lambda after: NOON + after),
        total=st.integers(0, 50_000),
        done=st.integers(0, 50_000),
        tokens=st.integers(0, 10**7),
    ),
    max_size=6,
    unique_by=lambda one: one.id,
)


@given(works=WORKS, speed=st.floats(0.1, 1e5), now=st.integers(0, 86_400), whole=st.booleans())
def test_all_plans_make_sense(works: list[BatchWork], speed: float, now: int, whole: bool) -> None:
    at = MIDNIGHT + now
    hours = None if whole else NIGHT
    found = plan_batches(works, speed, hours, {"a": 2.0}, at)
    assert set(found) == {one.id for one in works}
    inside = hours is None or hours.contain(at)
    for one in works:
        plan = found[one.id]
        assert 0 <= plan.late_lines <= one.left
        assert (plan.state is SpeedState.WAITING) == (plan.lines_per_s == 0)
        assert (plan.state is SpeedState.WAITING) == (plan.starts_at is not None)
        assert not math.isnan(plan.lines_per_s)
        if inside:
            assert plan.state is SpeedState.FULL_SPEED
        if plan.ends_at is not None:
            assert at <= plan.ends_at <= max(at, one.expires_at)
        if plan.late_lines:
            # All that can be done for it is done.
            assert any(
                found[other.id].state is SpeedState.FULL_SPEED
                for other in works
                if other.tenant == one.tenant and other.expires_at <= one.expires_at
            )


@given(work_h=st.floats(0.1, 40), window_h=st.floats(1, 168), begin_h=st.floats(0, 24))
def test_a_plan_that_is_kept_ends_in_time(work_h: float, window_h: float, begin_h: float) -> None:
    """Followed minute by minute, at the speed that it assumes."""
    now = MIDNIGHT + begin_h * HOUR_S
    one = work(work_h, window_h, now)
    first = planned(one, now=now)["a"]
    step_s = max(60.0, window_h * HOUR_S / 500)
    left, at = float(one.left), now
    while left > 0 and at < one.expires_at:
        lines = math.ceil(left)
        plan = planned(replace(one, total=lines + 10), now=at)["a"]
        full = SPEED / 10
        left -= min(full, plan.lines_per_s) * min(step_s, one.expires_at - at)
        at += step_s
    # A step may begin outside of the hours and end inside.
    slack = 2 * step_s * SPEED / 10 + 0.02 * one.left + 1
    assert left <= first.late_lines + slack
