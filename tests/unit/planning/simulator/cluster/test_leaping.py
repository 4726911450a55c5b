"""A run of identical steps teaches a step planner what its single steps teach it."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import PlanRow, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits, Sequence
from planning.simulator.cluster.leaping import (
    LeapingBudget,
    LeapingPlanner,
    LeapingScheduler,
    LeapingUnitCost,
)
from worker.core.step_planner import MIN_TOKENS, MeanStep
from worker.costs.step_costs import StepCosts

COSTS = StepCosts((1.0, 0.5, 0.0), (5.0, 0.25, 0.001))
BATCH = 3
CONTEXT = 300
"""Tokens that the sequences of the first step attend to in all."""
RESULT = StepResult(1, (), 0.0)


def plan(step: int) -> StepPlan:
    """A step of a run: each of the sequences computes one token."""
    start = CONTEXT // BATCH - 1 + step
    rows = tuple(PlanRow(number, start, 1, (), True) for number in range(BATCH))
    return StepPlan(step, (), (), rows)


def make_scheduler() -> Scheduler:
    return Scheduler(BlockPool(100), SchedulerLimits(16, 64, 8, 1000))


def add(scheduler: Scheduler, number: int, prompt: int) -> None:
    sampling = SamplingParams(max_tokens=10, ignore_eos=True)
    spec = SequenceSpec(f"r{number}", 0, "router", (number,) * prompt, prompt, sampling)
    scheduler.add(Sequence(number, spec, stop_ids=(), hash_key=b""))


@pytest.mark.parametrize("steps", [1, 5, 16, 40])
def test_a_run_is_as_good_as_its_steps_for_the_mean(steps: int) -> None:
    one, many = (LeapingPlanner(make_scheduler(), COSTS, 0.025, is_cpu=True) for _ in range(2))
    for step in range(steps):
        one.observe(plan(step), RESULT, 7.0 + 0.1 * step)
    many.observe_run(BATCH, CONTEXT, steps, 7.0, 0.1)
    assert one.mean_step() == many.mean_step() != MeanStep()


@pytest.mark.parametrize("steps", [1, 5, 40])
def test_a_run_is_as_good_as_its_steps_for_other_prompts(steps: int) -> None:
    """Each step takes twice what is predicted for it."""
    one, many = (LeapingBudget(COSTS, 0.024) for _ in range(2))
    unlearned = one.max_tokens(BATCH, CONTEXT, 0)
    predicted = [COSTS.step_ms(BATCH, CONTEXT + BATCH * step) for step in range(steps)]
    for step, ms in enumerate(predicted):
        one.observe(plan(step), 2 * ms)
    many.observe_run(BATCH, CONTEXT, steps, 2 * predicted[0], 2 * 0.001 * BATCH)
    learned = one.max_tokens(BATCH, CONTEXT, 0)
    assert MIN_TOKENS < learned < unlearned
    assert many.max_tokens(BATCH, CONTEXT, 0) == learned


@pytest.mark.parametrize("slowdown", [1, 2])
def test_a_run_bounds_the_prompt_tokens_of_the_next_step(slowdown: int) -> None:
    scheduler = make_scheduler()
    planner = LeapingPlanner(scheduler, COSTS, 0.021, is_cpu=True)
    add(scheduler, 1, prompt=10)
    first = planner.next_plan()
    assert first is not None
    scheduler.complete(first, StepResult(first.step, ((1,),), 0.01))
    step_ms = slowdown * COSTS.step_ms(1, 11)
    planner.observe_run(1, 11, 100, step_ms, slowdown * 0.001)
    add(scheduler, 2, prompt=60)
    plan = planner.next_plan()
    assert plan is not None
    # At half a millisecond a prompt token.
    assert sorted(row.count for row in plan.rows) == [1, int((21 - step_ms) / 0.5)]


@given(
    st.integers(1, 300),
    st.floats(0.1, 10.0),
    st.floats(0.0, 0.1),
    st.floats(0.001, 1.0),
    st.floats(0.0, 0.01),
)
def test_a_run_is_as_good_as_its_observations(
    count: int, units: float, more_units: float, seconds: float, more_seconds: float
) -> None:
    one, many = LeapingUnitCost(0.3, 5.0), LeapingUnitCost(0.3, 5.0)
    for place in range(count):
        one.observe(units + place * more_units, seconds + place * more_seconds)
    many.observe_run(count, (units, more_units), (seconds, more_seconds))
    assert many.unit_s == pytest.approx(one.unit_s, rel=1e-12)
    for pace in (one, many):
        pace.observe(1.0, 7.0)
    assert many.unit_s == pytest.approx(one.unit_s, rel=1e-12)


BLOCK = 4
PLENTY = 1000


class Worker:
    """A scheduler with up to two plans in flight. Each token is its sequence's number."""

    def __init__(self, blocks: int, depth: int) -> None:
        limits = SchedulerLimits(BLOCK, 64, 16, PLENTY)
        self.scheduler = LeapingScheduler(BlockPool(blocks), limits)
        self.plans: deque[StepPlan] = deque()
        self.depth = depth
        self.ended: list[int] = []

    def add(self, number: int, prompt: int, answer: int) -> None:
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
        spec = SequenceSpec(f"r{number}", 0, "router", (number,) * prompt, prompt, sampling)
        self.scheduler.add(Sequence(number, spec, stop_ids=(), hash_key=b""))
        self.plan()

    def plan(self) -> None:
        while len(self.plans) < self.depth:
            plan = self.scheduler.schedule()
            if plan is None:
                return
            self.plans.append(plan)

    def step(self) -> None:
        plan = self.plans.popleft()
        tokens = tuple((row.sequence_id,) if row.sample else () for row in plan.rows)
        for update in self.scheduler.complete(plan, StepResult(plan.step, tokens, 0.01)):
            if update.sequence.finish_reason:
                self.ended.append(update.sequence.sequence_id)
        self.plan()

    def state(self) -> object:
        scheduler, pool = self.scheduler, self.scheduler.pool
        pool.check()
        return (
            pool.counts(),
            sorted(pool.held_hashes()),
            scheduler.preemptions,
            self.ended,
            [
                (s.sequence_id, s.token_ids, s.computed, s.scheduled, s.pending, s.registered)
                for s in (*scheduler.running, *scheduler.waiting)
            ],
        )


def token_of(sequence: Sequence) -> int:
    return sequence.sequence_id


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=5),
    st.integers(24, 90),
    st.integers(1, 2),
    st.data(),
)
def test_a_leap_is_as_good_as_its_steps(
    asked: list[tuple[int, int]], blocks: int, depth: int, data: st.DataObject
) -> None:
    stepping, leaping = Worker(blocks, depth), Worker(blocks, depth)
    for number, (prompt, answer) in enumerate(asked):
        for worker in (stepping, leaping):
            worker.add(number, prompt, answer)
    for _ in range(PLENTY):
        if not stepping.plans:
            break
        steps = leaping.scheduler.identical_steps()
        if steps:
            count = data.draw(st.integers(1, steps))
            leaping.scheduler.leap(count, token_of)
        else:
            count = 1
            leaping.step()
        for _ in range(count):
            stepping.step()
        assert leaping.state() == stepping.state()
    assert not leaping.plans
    assert len(stepping.ended) == len(asked)


def test_a_lone_answer_is_one_leap_except_at_its_ends() -> None:
    worker = Worker(blocks=100, depth=1)
    worker.add(7, prompt=8, answer=50)
    worker.step()
    assert worker.scheduler.identical_steps() == 48
    worker.scheduler.leap(48, token_of)
    assert worker.scheduler.identical_steps() == 0
    worker.step()
    assert worker.ended == [7]


def test_blocks_bound_a_leap() -> None:
    worker = Worker(blocks=6, depth=1)
    worker.add(1, prompt=8, answer=50)
    worker.step()
    # 24 tokens have room; the last one's KV is computed by the step after it.
    assert worker.scheduler.identical_steps() == 24 - 9


def test_a_waiting_sequence_ends_the_leaps() -> None:
    worker = Worker(blocks=100, depth=1)
    worker.add(1, prompt=8, answer=50)
    worker.step()
    worker.add(2, prompt=8, answer=50)
    assert worker.scheduler.identical_steps() == 0
