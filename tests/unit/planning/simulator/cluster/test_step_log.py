"""Runs of steps, in closed form and one by one."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from planning.simulator.cluster.step_log import StepLog, StepRun

SECONDS = st.floats(1e-4, 1.0)


@given(SECONDS, st.one_of(st.just(0.0), st.floats(1e-9, 1e-2)), st.integers(0, 300), st.data())
def test_the_steps_that_have_ended_are_found(
    step_s: float, growth_s: float, steps: int, data: st.DataObject
) -> None:
    run = StepRun(0, 7.25, step_s, growth_s)
    begin, end = run.end_s(steps), run.end_s(steps + 1)
    assert run.ended_at(begin) == steps
    between = data.draw(st.floats(begin, end, exclude_max=True))
    assert run.ended_at(between) == steps


def test_before_it_begins_nothing_has_ended() -> None:
    assert StepRun(0, 5.0, 0.1).ended_at(4.0) == 0


@given(st.lists(st.tuples(st.integers(1, 9), SECONDS, st.floats(0.0, 1e-2)), min_size=1), st.data())
def test_a_log_gives_every_steps_end(
    runs: list[tuple[int, float, float]], data: st.DataObject
) -> None:
    log, now = StepLog(), 0.0
    ends: list[float] = []
    for count, step_s, growth_s in runs:
        log.add(StepRun(len(ends), now, step_s, growth_s))
        for step in range(count):
            now += step_s + step * growth_s
            ends.append(now)
    last = data.draw(st.integers(0, len(ends) - 1))
    first = data.draw(st.integers(0, last))
    assert log.ends_s(first, last) == pytest.approx(np.array(ends[first : last + 1]))


def test_a_run_that_is_begun_again_replaces_itself() -> None:
    log = StepLog()
    log.add(StepRun(0, 0.0, 1.0))
    log.add(StepRun(0, 0.0, 2.0))
    assert log.ends_s(0, 0).tolist() == [2.0]
