from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.step import StepInput
from engine.scheduling.plan import PlanRow
from loadtest.research.timed.engine import (
    FIRST_TOKEN_ID,
    PLANNED_AHEAD_S,
    TOKEN_IDS,
    TimedStepModel,
)
from planning.simulator.costs.step_model import FittedCosts
from worker.costs.step_costs import StepCosts

VOCABULARY = 100
COSTS = FittedCosts(StepCosts(prefill=(10.0, 0.5, 0.001), step=(20.0, 2.0, 0.01)))

STEP_S = 0.020 + 0.002 + 0.01 * 11 / 1e3
"""Of ``decode_step``."""


class Clock:
    """Time that passes in sleeps alone, and each takes longer than it was asked to."""

    def __init__(self, oversleeps: Sequence[float] = ()) -> None:
        self.now = 1000.0
        self._oversleeps = list(oversleeps)

    def sleep(self, seconds: float) -> None:
        self.now += seconds + (self._oversleeps.pop(0) if self._oversleeps else 0.0)


def model_with(clock: Clock, costs: FittedCosts = COSTS) -> TimedStepModel:
    return TimedStepModel(costs, VOCABULARY, clock=lambda: clock.now, sleep=clock.sleep)


def decode_step(token_id: int = 5, start: int = 10, *, greedy: bool = True) -> StepInput:
    return StepInput((PlanRow(0, start, 1, (0,), True),), [token_id], [0], greedy)


def test_a_step_takes_what_the_cost_model_says() -> None:
    model = model_with(Clock())
    decodes = (PlanRow(0, 99, 1, (), True), PlanRow(1, 199, 1, (), True))
    chunk = PlanRow(2, 100, 64, (), False)
    for rows in (decodes, (chunk,), (*decodes, chunk)):
        model.run(StepInput(rows, [5] * sum(row.count for row in rows), [0], True))
    of_chunk = 0.032 + 0.064 * (100 + 32) / 1e3
    asked = [timing.asked_s for timing in model.take_timings()]
    assert asked == pytest.approx([0.027, 0.010 + of_chunk, 0.027 + of_chunk])


@given(st.lists(st.floats(0, PLANNED_AHEAD_S / 2), min_size=2, max_size=30))
def test_what_steps_oversleep_does_not_add_up(oversleeps: list[float]) -> None:
    clock = Clock(oversleeps)
    model = model_with(clock)
    began = clock.now
    for _ in oversleeps:
        model.run(decode_step())
    asked = len(oversleeps) * STEP_S
    assert clock.now - began == pytest.approx(asked + oversleeps[-1])


def test_a_step_after_a_pause_takes_its_whole_time() -> None:
    clock = Clock()
    model = model_with(clock)
    model.run(decode_step())
    clock.now += 2 * PLANNED_AHEAD_S
    began = clock.now
    model.run(decode_step())
    assert clock.now - began == pytest.approx(STEP_S)


def test_steps_that_are_planned_soon_are_counted_from_the_last_one() -> None:
    clock = Clock()
    model = model_with(clock)
    model.run(decode_step())
    began = clock.now
    clock.now += PLANNED_AHEAD_S / 2
    model.run(decode_step())
    step_s = STEP_S
    assert clock.now - began == pytest.approx(step_s)
    first, second = model.take_timings()
    assert (first.asked_s, second.took_s) == pytest.approx((step_s, step_s))
    assert second.gap_s == pytest.approx(PLANNED_AHEAD_S / 2)
    assert model.take_timings() == []


def test_one_that_fell_behind_does_not_sleep() -> None:
    clock = Clock([1.0])
    model = model_with(clock)
    model.run(decode_step())
    before = clock.now
    model.run(decode_step())
    assert clock.now == before


def test_a_token_depends_on_the_one_before_it_and_its_place_alone() -> None:
    model = model_with(Clock())
    chunk = StepInput((PlanRow(3, 8, 3, (0,), True),), [1, 2, 5], [2], greedy=True)
    both = StepInput(
        (PlanRow(0, 7, 1, (0,), True), PlanRow(1, 10, 1, (1,), True)), [9, 5], [0, 1], greedy=True
    )
    alone = (model.run(decode_step(token_id=5, start=10)).best or [])[0]
    assert model.run(chunk).best == [alone]
    assert (model.run(both).best or [])[1] == alone
    assert FIRST_TOKEN_ID <= alone < FIRST_TOKEN_ID + TOKEN_IDS


def test_a_draw_gets_the_same_token() -> None:
    model = model_with(Clock())
    logits = model.run(decode_step(greedy=False)).logits
    assert logits is not None
    assert logits.shape == (1, VOCABULARY)
    assert logits.dtype == torch.float32
    assert logits.argmax(dim=-1).tolist() == model.run(decode_step()).best
