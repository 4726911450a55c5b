"""When failed steps end a worker."""

from __future__ import annotations

import pytest

from worker.core.failed_steps import MAX_FAILED_STEPS, FailedSteps


def test_steps_of_several_requests_end_it() -> None:
    failed = FailedSteps()
    ends = [failed.add(step, step, {f"r{step}", "r0" if step < 3 else ""}) for step in range(1, 4)]
    assert ends == [False, False, True]
    assert failed.count == MAX_FAILED_STEPS


def test_a_step_between_them_that_ended_well_begins_a_new_row() -> None:
    failed = FailedSteps()
    for step in range(1, 100, 3):
        assert not failed.add(step, step, {f"r{step}"})
        assert not failed.add(step + 1, step + 1, {f"r{step + 1}"})
        failed.end_row()


def test_one_request_in_all_of_them_is_to_blame() -> None:
    """Others come and go with it; the worker ends with the first failure without it."""
    failed = FailedSteps()
    for step in range(1, 20):
        assert not failed.add(step, step, {"bad", f"r{step}"})
    assert failed.add(20, 20, {"r20"})


def test_what_was_planned_before_the_failure_was_known_does_not_count() -> None:
    failed = FailedSteps()
    # Each failure of a step takes along the one that was planned behind it.
    assert not failed.add(1, 2, {"a"})
    assert not failed.add(2, 2, {"a", "b"})
    assert not failed.add(3, 4, {"c"})
    assert not failed.add(4, 4, {"c", "d"})
    assert failed.count == 2
    assert failed.add(5, 6, {"e"})


@pytest.mark.parametrize("last", [{"a"}, {"b"}])
def test_steps_whose_sequences_had_left_blame_no_request(last: set[str]) -> None:
    failed = FailedSteps()
    assert not failed.add(1, 1, set())
    assert not failed.add(2, 2, {"a"})
    assert failed.add(3, 3, last) == (last == {"b"})


def test_failed_steps_without_sequences_end_it() -> None:
    failed = FailedSteps()
    assert [failed.add(step, step, set()) for step in range(3)] == [False, False, True]
