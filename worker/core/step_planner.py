"""When the next step may be planned, how many prompt tokens it may compute, and the latest steps.

``PrefillBudget`` bounds the prompt tokens of a step in which other sequences decode. The calibrated
costs predict that bound from the SLO of those sequences, and from their own step. Each prediction
is multiplied by the ratio of measured to predicted step times, because a step shares its host with
others.

This part of the engine core needs neither a thread nor an event loop. Plain Python.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import ReturnsHere, Scheduler
from worker.costs.step_costs import StepCosts, UnitCost

MIN_TOKENS = 16
"""Minimum number of prompt tokens that a step may compute, however much they delay sequences that
decode."""
MAX_SLOWDOWN = 4.0
"""Maximum duration of a step that also computes prompt tokens, as a multiple of the step without
them.

Larger chunks hardly compute prompts faster: their step reads the weights once, too. They only make
the pauses between the tokens of running answers longer.
"""
PRIOR_MS = 50.0
"""Weight of the predicted step times against the first measured ones, in milliseconds of predicted
time."""
_MAX_RATIO = 8.0
"""Maximum ratio of measured to predicted step time that is learned. If a step took longer,
something else delayed it."""


class PrefillBudget:
    """Prefill token budget: bounds the prompt tokens of a step in which other sequences decode."""

    def __init__(self, costs: StepCosts, slo_s: float) -> None:
        """``costs`` predict step times. ``slo_s`` is the maximum duration, in seconds, of a step
        that computes prompt tokens while sequences decode."""
        self._costs = costs
        self._slo_ms = slo_s * 1e3
        self._step = UnitCost(1.0, PRIOR_MS)
        self._chunk = UnitCost(1.0, PRIOR_MS)

    def max_tokens(self, batch: int, context_tokens: int, start: int) -> int:
        """Return how many tokens of a prompt the next step may compute. The first ``start`` tokens
        of the prompt are computed already.

        ``batch`` sequences decode in the same step, and attend to ``context_tokens`` tokens in
        total.
        """
        step_ms = self._step.unit_s * self._costs.step_ms(batch, context_tokens)
        left = min(self._slo_ms, MAX_SLOWDOWN * step_ms) - step_ms
        left /= self._chunk.unit_s
        _, b, c = self._costs.prefill
        # Solves b*n + c*n*(start + n/2) = left for n, in the form that also works for c = 0.
        linear = b + c * start
        divisor = linear + math.sqrt(linear * linear + 2 * c * max(0.0, left))
        if divisor <= 0:
            return MIN_TOKENS
        return max(MIN_TOKENS, int(2 * left / divisor))

    def observe(self, plan: StepPlan, ms: float) -> None:
        """Correct the predictions with a step that took ``ms`` milliseconds."""
        decoding = [row for row in plan.rows if row.count == 1]
        context_tokens = sum(row.start + 1 for row in decoding)
        step_ms = self._costs.step_ms(len(decoding), context_tokens)
        if plan.decodes_only:
            _learn(self._step, step_ms, ms)
        elif decoding:
            chunks = [row for row in plan.rows if row.count > 1]
            chunk_ms = sum(self._costs.chunk_ms(row.count, row.start) for row in chunks)
            _learn(self._chunk, chunk_ms, ms - self._step.unit_s * step_ms)


def _learn(pace: UnitCost, predicted_ms: float, ms: float) -> None:
    pace.observe(predicted_ms, min(ms, _MAX_RATIO * pace.unit_s * predicted_ms))


KEPT = 16
"""Number of latest decode steps over which the mean is computed."""
_DEPTH = 2
"""Maximum number of step plans in flight."""


class StepPlanner:
    """Decides when the next step is planned, and how many prompt tokens it may compute."""

    def __init__(
        self,
        scheduler: Scheduler,
        budget: PrefillBudget | None,
        *,
        is_cpu: bool,
        returns_here: ReturnsHere | None = None,
    ) -> None:
        """``budget`` bounds the prompt tokens of a step in which other sequences decode.

        Without it, only the step's own limits apply. ``is_cpu``: true if steps are computed on a
        CPU. ``returns_here`` is passed to ``Scheduler.schedule``.
        """
        self._scheduler = scheduler
        self._budget = budget
        self._is_cpu = is_cpu
        self._returns_here = returns_here
        self._history = StepHistory()
        self._last_plan: StepPlan | None = None

    def next_plan(self) -> StepPlan | None:
        """Plan the next step. Returns None if it is too early to plan, or if no work is left."""
        if not self._may_plan():
            return None
        plan = self._scheduler.schedule(self._max_prompt_tokens(), self._returns_here)
        if plan is not None:
            self._last_plan = plan
        return plan

    def _may_plan(self) -> bool:
        """Whether the next step may be planned now, perhaps while another one runs.

        Planning ahead means that the engine never waits for a plan. On a CPU, no step is planned
        while a step with prompts runs. Otherwise, a request that arrives meanwhile would have to
        wait for two steps.
        """
        in_flight = self._scheduler.plans_in_flight
        if in_flight != 1 or not self._is_cpu:
            return in_flight < _DEPTH
        return self._last_plan is not None and self._last_plan.decodes_only

    def _max_prompt_tokens(self) -> int | None:
        """Return the maximum prompt tokens of the next step; None if the budget does not apply."""
        if self._budget is None:
            return None
        decoding = self._scheduler.decoding
        start = self._scheduler.next_chunk_start
        if not decoding or start is None:
            return None
        context_tokens = sum(sequence.target for sequence in decoding)
        return self._budget.max_tokens(len(decoding), context_tokens, start)

    def observe(self, plan: StepPlan, result: StepResult, wall_ms: float) -> None:
        """Record a step. It ended ``wall_ms`` milliseconds after the previous step ended, or after
        its own submission if that was later."""
        self._history.observe(plan, result, wall_ms)
        if self._budget is not None:
            self._budget.observe(plan, wall_ms)

    def mean_step(self) -> MeanStep:
        """Return the mean of the latest steps in which every sequence decoded."""
        return self._history.mean()


@dataclass(frozen=True, slots=True)
class MeanStep:
    """The mean of the latest decode steps. All fields are zero if there were no such steps."""

    ms: float = 0.0
    """Milliseconds of a step, divided by the tokens that it brought each sequence."""
    batch: float = 0.0
    context_tokens: float = 0.0


class StepHistory:
    """Sizes and durations of the latest steps in which every sequence decoded.

    If drafts were accepted, a step brings a sequence several tokens. Routers need the time from one
    token to the next. So the milliseconds are those of one token per sequence.
    """

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, int, int]] = deque(maxlen=KEPT)

    def observe(self, plan: StepPlan, result: StepResult, ms: float) -> None:
        """Record a step. It ended ``ms`` milliseconds after the previous step ended, or after its
        own submission if that was later."""
        if plan.decodes_only:
            context_tokens = sum(row.start + 1 for row in plan.rows)
            batch = len(plan.rows)
            self.add(ms, batch, context_tokens, batch + result.accepted)

    def add(self, ms: float, batch: int, context_tokens: int, tokens: int) -> None:
        """Add a step of ``ms`` milliseconds with ``batch`` sequences. It brought them ``tokens``
        tokens in total."""
        self._steps.append((ms, batch, context_tokens, tokens))

    def copy(self) -> StepHistory:
        """Return a history of the same steps."""
        other = StepHistory()
        other._steps.extend(self._steps)
        return other

    def mean(self) -> MeanStep:
        """Return the mean of the latest ``KEPT`` steps."""
        if not self._steps:
            return MeanStep()
        count = len(self._steps)
        ms, batch, context_tokens, tokens = (
            sum(column) for column in zip(*self._steps, strict=True)
        )
        return MeanStep(ms / count * batch / tokens, batch / count, context_tokens / count)
