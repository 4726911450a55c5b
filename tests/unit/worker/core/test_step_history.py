"""Means over the latest decode steps."""

from __future__ import annotations

from engine.scheduling.plan import PlanRow, StepPlan, StepResult
from worker.core.step_history import MeanStep, StepHistory


def plan(*rows: tuple[int, int]) -> StepPlan:
    """Of (start, count) each."""
    made = tuple(PlanRow(n, start, count, (), True) for n, (start, count) in enumerate(rows))
    return StepPlan(1, (), (), made)


NOTHING_ACCEPTED = StepResult(1, (), 0.0)


def test_means_of_decode_steps_alone() -> None:
    history = StepHistory()
    assert history.mean() == MeanStep(0.0, 0.0, 0.0)
    history.observe(plan((9, 1)), NOTHING_ACCEPTED, 10.0)
    history.observe(plan((9, 1), (0, 30)), NOTHING_ACCEPTED, 500.0)
    history.observe(plan((10, 1), (18, 1), (0, 1)), NOTHING_ACCEPTED, 20.0)
    assert history.mean() == MeanStep(15.0, 2.0, (10 + 11 + 19 + 1) / 2)


def test_old_steps_are_forgotten() -> None:
    history = StepHistory()
    history.observe(plan((9, 1)), NOTHING_ACCEPTED, 1000.0)
    for _ in range(16):
        history.observe(plan((9, 1)), NOTHING_ACCEPTED, 10.0)
    assert history.mean().ms == 10.0


def test_a_step_of_several_tokens_counts_for_as_many() -> None:
    """Ten milliseconds for two sequences' five tokens: four for one of each."""
    history = StepHistory()
    history.observe(plan((9, 1), (4, 1)), StepResult(1, (), 0.0, drafted=4, accepted=3), 10.0)
    assert history.mean() == MeanStep(4.0, 2.0, 15.0)
    history.observe(plan((9, 1), (4, 1)), NOTHING_ACCEPTED, 4.0)
    assert history.mean().ms == 14.0 / 2 * 4 / 7
