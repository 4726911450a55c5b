"""Engine time and virtual time are one another's inverse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.simulator.cluster.work_clock import WorkClock


def test_an_engine_alone_keeps_virtual_time_to_the_bit() -> None:
    clock = WorkClock()
    times = np.array([0.1, 7.3, 1e5 + 0.1])
    assert clock.moments(times) is times
    assert [clock.moment(time) for time in times] == times.tolist()
    assert [clock.engine_time(time) for time in times] == times.tolist()


def test_half_the_speed_takes_twice_as_long() -> None:
    clock = WorkClock()
    clock.change(10.0, 0.5)
    clock.change(14.0, 2.0)
    assert clock.engine_time(15.0) == pytest.approx(14.0)
    assert clock.moment(14.0) == pytest.approx(15.0)
    assert clock.moments(np.array([9.0, 10.0, 11.0, 12.0, 14.0])) == pytest.approx(
        [9.0, 10.0, 12.0, 14.0, 15.0]
    )


def test_the_last_of_several_changes_at_a_moment_counts() -> None:
    clock = WorkClock()
    clock.change(1.0, 0.5)
    clock.change(1.0, 0.25)
    clock.change(1.0, 1.0)
    assert clock.moment(2.0) == 2.0


@given(
    st.lists(st.tuples(st.floats(0.0, 5.0), st.floats(0.1, 1.0)), max_size=8),
    st.lists(st.floats(0.0, 30.0), min_size=1, max_size=8),
)
def test_moments_lie_where_they_were_passed(
    changes: list[tuple[float, float]], passed: list[float]
) -> None:
    """Whatever came behind them, and whichever part of the past is asked for."""
    clock, moments, engine_times = WorkClock(), sorted(passed), []
    left = list(moments)
    now = 0.0
    for gap_s, speed in changes:
        now += gap_s
        while left and left[0] < now:
            engine_times.append(clock.engine_time(left.pop(0)))
        clock.change(now, speed)
    engine_times += [clock.engine_time(moment) for moment in left]
    assert clock.moments(np.array(engine_times)) == pytest.approx(moments, abs=1e-9)
    assert clock.moments(np.array(engine_times[-1:])) == pytest.approx(moments[-1:], abs=1e-9)
