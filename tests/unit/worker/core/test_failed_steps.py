"""When failed steps end a worker."""

from __future__ import annotations

from worker.core.failed_steps import MAX_FAILED_STEPS, FailedSteps


def test_shared_failures_in_a_row_end_it() -> None:
    """Each of their sequences succeeds alone in between."""
    failed = FailedSteps()
    for step in range(1, MAX_FAILED_STEPS):
        assert not failed.count_shared(10 * step, 10 * step)
        failed.count_success(rerun=True)
    assert failed.count_shared(100, 100)
    assert failed.shared == MAX_FAILED_STEPS


def test_a_step_of_all_that_ends_well_begins_a_new_row() -> None:
    failed = FailedSteps()
    for step in range(1, 100, 3):
        assert not failed.count_shared(step, step)
        assert not failed.count_shared(step + 1, step + 1)
        failed.count_success(rerun=False)


def test_a_sequence_that_fails_alone_explains_the_shared_failure() -> None:
    failed = FailedSteps()
    for step in range(1, 100):
        assert not failed.count_shared(step, step)
        failed.count_success(rerun=True)
        assert not failed.count_alone()


def test_what_was_planned_before_the_failure_was_known_does_not_count() -> None:
    failed = FailedSteps()
    # Each failure of a step takes along the one that was planned behind it.
    assert not failed.count_shared(1, 2)
    assert not failed.count_shared(2, 2)
    assert not failed.count_shared(3, 4)
    assert not failed.count_shared(4, 4)
    assert failed.shared == 2
    assert failed.count_shared(5, 6)


def test_failures_alone_in_a_row_ask_for_a_probe() -> None:
    failed = FailedSteps()
    asked = [failed.count_alone() for _ in range(MAX_FAILED_STEPS + 1)]
    assert asked == [False] * (MAX_FAILED_STEPS - 1) + [True, True]
    failed.count_success(rerun=True)
    assert not failed.count_alone()
