"""The workers' step planner, which also observes a run of identical steps in one call.

A run is several steps in which the same sequences get one token each. Plain Python; owned by a
simulated worker.
"""

from __future__ import annotations

from engine.scheduling.scheduler import Scheduler
from worker.core.prefill_budget import PRIOR_MS, PrefillBudget
from worker.core.step_planner import KEPT as KEPT_STEPS
from worker.core.step_planner import StepPlanner
from worker.costs.step_costs import StepCosts
from worker.costs.unit_cost import KEPT, UnitCost


class LeapingPlanner(StepPlanner):
    """See the module's text."""

    def __init__(
        self, scheduler: Scheduler, costs: StepCosts, slo_s: float | None, *, is_cpu: bool
    ) -> None:
        """``slo_s``: the longest that a step with prompts and sequences that decode may take, in

        seconds; None sets no bound. ``is_cpu``: see ``StepPlanner``.
        """
        self._leaping_budget = None if slo_s is None else LeapingBudget(costs, slo_s)
        super().__init__(scheduler, self._leaping_budget, is_cpu=is_cpu)

    def observe_run(
        self, batch: int, context_tokens: int, steps: int, ms: float, growth_ms: float
    ) -> None:
        """``observe`` for ``steps`` steps of ``batch`` sequences.

        The first step attended to ``context_tokens`` in all and took ``ms``; each took
        ``growth_ms`` more than the one before it.
        """
        for step in range(max(0, steps - KEPT_STEPS), steps):
            context = context_tokens + step * batch
            self._history.add(ms + step * growth_ms, batch, context, batch)
        if self._leaping_budget is not None:
            self._leaping_budget.observe_run(batch, context_tokens, steps, ms, growth_ms)


class LeapingBudget(PrefillBudget):
    """A ``PrefillBudget`` that observes runs."""

    def __init__(self, costs: StepCosts, slo_s: float) -> None:
        """See ``PrefillBudget``."""
        super().__init__(costs, slo_s)
        self._leaping_step = LeapingUnitCost(1.0, PRIOR_MS)
        self._step = self._leaping_step

    def observe_run(
        self, batch: int, context_tokens: int, steps: int, ms: float, growth_ms: float
    ) -> None:
        """As ``LeapingPlanner.observe_run``. No step of a run is taken for one that was held up."""
        predicted = self._costs.step_ms(batch, context_tokens)
        growth = self._costs.step_ms(batch, context_tokens + batch) - predicted
        self._leaping_step.observe_run(steps, (predicted, growth), (ms, growth_ms))


class LeapingUnitCost(UnitCost):
    """A ``UnitCost`` that observes runs."""

    def observe_run(
        self, count: int, units: tuple[float, float], seconds: tuple[float, float]
    ) -> None:
        """``observe``, ``count`` times in a row.

        ``units`` and ``seconds`` are each the first observation and what every further one adds to
        the one before it. The first is positive, the growth at least 0.
        """
        kept = KEPT**count
        self._units = kept * self._units + _faded(count, *units)
        self._seconds = kept * self._seconds + _faded(count, *seconds)


def _faded(count: int, first: float, growth: float) -> float:
    """The sum of ``first + i*growth``, each counting ``KEPT`` as much as the next one.

    A geometric and an arithmetico-geometric series.
    """
    rest = 1.0 - KEPT
    weights = (1.0 - KEPT**count) / rest
    lags = KEPT * (1.0 - count * KEPT ** (count - 1) + (count - 1) * KEPT**count) / rest**2
    return (first + (count - 1) * growth) * weights - growth * lags
