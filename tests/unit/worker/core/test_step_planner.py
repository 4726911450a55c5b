"""When the next step may be planned, and means over the latest decode steps."""

from __future__ import annotations

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import PlanRow, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits, Sequence
from worker.core.step_planner import MIN_TOKENS, MeanStep, PrefillBudget, StepHistory, StepPlanner
from worker.costs.step_costs import StepCosts

COSTS = StepCosts((1.0, 0.5, 0.0), (5.0, 0.0, 0.0))


def add(scheduler: Scheduler, number: int, prompt: int, answer: int = 10) -> None:
    sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
    spec = SequenceSpec(f"r{number}", 0, "router", (number,) * prompt, prompt, sampling)
    scheduler.add(Sequence(number, spec, stop_ids=(), hash_key=b""))


def complete(scheduler: Scheduler, plan: StepPlan) -> None:
    tokens = tuple((1,) if row.sample else () for row in plan.rows)
    scheduler.complete(plan, StepResult(plan.step, tokens, 0.01))


def scheduler() -> Scheduler:
    return Scheduler(BlockPool(100), SchedulerLimits(16, 64, 8, 1000))


def test_a_gpu_plans_behind_a_long_step_and_a_cpu_does_not() -> None:
    for is_cpu, expected in ((False, 2), (True, 1)):
        scheduled = scheduler()
        planner = StepPlanner(scheduled, None, is_cpu=is_cpu)
        add(scheduled, 1, 200)
        plans = []
        while (plan := planner.next_plan()) is not None:
            plans.append(plan)
        assert len(plans) == expected


def test_a_cpu_plans_behind_single_tokens() -> None:
    scheduled = scheduler()
    planner = StepPlanner(scheduled, None, is_cpu=True)
    add(scheduled, 1, 10)
    plan = planner.next_plan()
    assert plan is not None
    complete(scheduled, plan)
    assert planner.next_plan() is not None
    assert planner.next_plan() is not None
    assert planner.next_plan() is None


def test_prompts_during_decoding_take_what_the_slo_leaves() -> None:
    scheduled = scheduler()
    planner = StepPlanner(scheduled, PrefillBudget(COSTS, 0.018), is_cpu=True)
    add(scheduled, 1, 10)
    plan = planner.next_plan()
    assert plan is not None
    complete(scheduled, plan)
    add(scheduled, 2, 60)
    plan = planner.next_plan()
    assert plan is not None
    # 18 ms less a step of 5, at half a millisecond a token.
    assert sorted(row.count for row in plan.rows) == [1, 26]
    assert MIN_TOKENS < 26


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
