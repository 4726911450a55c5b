"""A chunk is as long as the SLO and the step of the others allow, but not below the minimum."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.scheduling.plan import PlanRow, StepPlan
from worker.core.step_planner import MAX_SLOWDOWN, MIN_TOKENS, PrefillBudget
from worker.costs.step_costs import StepCosts

COSTS = StepCosts((5.0, 0.5, 0.001), (4.0, 1.0, 0.001))
quick = settings(max_examples=200, deadline=None, derandomize=True)


def plan(*rows: tuple[int, int]) -> StepPlan:
    """Of (start, count) each."""
    made = tuple(PlanRow(n, start, count, (), True) for n, (start, count) in enumerate(rows))
    return StepPlan(1, (), (), made)


@quick
@given(st.integers(1, 64), st.integers(1, 100_000), st.integers(0, 100_000), st.floats(0.001, 5.0))
def test_the_longest_chunk_within_the_slo_and_the_slowdown(
    batch: int, context_tokens: int, start: int, slo_s: float
) -> None:
    count = PrefillBudget(COSTS, slo_s).max_tokens(batch, context_tokens, start)
    step_ms = COSTS.step_ms(batch, context_tokens)
    longest_ms = min(slo_s * 1e3, MAX_SLOWDOWN * step_ms)
    fits = step_ms + COSTS.chunk_ms(count, start) <= longest_ms + 1e-6
    assert fits or count == MIN_TOKENS
    assert count >= MIN_TOKENS
    assert step_ms + COSTS.chunk_ms(count + 1, start) > longest_ms - 1e-6


def test_costs_without_context_and_without_anything() -> None:
    linear = StepCosts((0.0, 0.5, 0.0), (10.0, 0.0, 0.0))
    assert PrefillBudget(linear, 0.1).max_tokens(1, 10, 1000) == 60
    assert PrefillBudget(linear, 0.025).max_tokens(1, 10, 1000) == 30
    assert PrefillBudget(StepCosts(), 0.1).max_tokens(1, 10, 0) == MIN_TOKENS


def test_steps_that_take_longer_leave_less() -> None:
    budget = PrefillBudget(COSTS, 0.051)
    before = budget.max_tokens(8, 800, 0)
    for _ in range(50):
        budget.observe(plan(*[(99, 1)] * 8), 2 * COSTS.step_ms(8, 800))
    between = budget.max_tokens(8, 800, 0)
    assert between < before
    for _ in range(50):
        mixed = plan(*[(99, 1)] * 8, (0, 64))
        budget.observe(mixed, 2 * COSTS.step_ms(8, 800) + 3 * COSTS.chunk_ms(64, 0))
    after = budget.max_tokens(8, 800, 0)
    left = 51 - 2 * COSTS.step_ms(8, 800)
    assert 3 * COSTS.chunk_ms(after, 0) <= left < 3 * COSTS.chunk_ms(after + 2, 0)


def test_a_step_that_was_held_up_is_not_held_against_the_others_for_long() -> None:
    budget = PrefillBudget(COSTS, 0.1)
    usual = budget.max_tokens(8, 800, 0)
    budget.observe(plan(*[(99, 1)] * 8), 60_000.0)
    for _ in range(30):
        budget.observe(plan(*[(99, 1)] * 8), COSTS.step_ms(8, 800))
    assert budget.max_tokens(8, 800, 0) >= 0.95 * usual


def test_a_prompt_alone_teaches_nothing() -> None:
    """It is as long as it likes, and no step of those that matter here."""
    budget = PrefillBudget(COSTS, 0.1)
    before = budget.max_tokens(8, 800, 0)
    budget.observe(plan((0, 512)), 9_000.0)
    assert budget.max_tokens(8, 800, 0) == before
