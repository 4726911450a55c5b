"""Extends the workers' step planner and scheduler with leaps: many identical steps in one call.

A step is identical to the one before it if it brings each running sequence its next token and
does nothing else. Plain Python; owned by a simulated worker.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence
from worker.core.step_planner import KEPT as KEPT_STEPS
from worker.core.step_planner import PRIOR_MS, MeanStep, PrefillBudget, StepHistory, StepPlanner
from worker.costs.step_costs import KEPT, StepCosts, UnitCost


class LeapingPlanner(StepPlanner):
    """A ``StepPlanner`` that also observes a run of identical steps in one call.

    A run is several steps in which the same sequences get one token each.
    """

    def __init__(
        self, scheduler: Scheduler, costs: StepCosts, slo_s: float | None, *, is_cpu: bool
    ) -> None:
        """``slo_s`` is the maximum time of a step with prompts and decoding sequences, in seconds.

        None sets no bound. ``is_cpu`` is passed to ``StepPlanner``.
        """
        self._leaping_budget = None if slo_s is None else LeapingBudget(costs, slo_s)
        super().__init__(scheduler, self._leaping_budget, is_cpu=is_cpu)

    def observe_run(
        self, batch: int, context_tokens: int, steps: int, ms: float, growth_ms: float
    ) -> None:
        """Observe ``steps`` steps of ``batch`` sequences, as ``steps`` calls of ``observe`` would.

        The first step attended to ``context_tokens`` in total and took ``ms`` milliseconds. Each
        further step took ``growth_ms`` more than the one before it.
        """
        _add_run(self._history, batch, context_tokens, steps, ms, growth_ms)
        if self._leaping_budget is not None:
            self._leaping_budget.observe_run(batch, context_tokens, steps, ms, growth_ms)

    def mean_after_run(
        self, batch: int, context_tokens: int, steps: int, ms: float, growth_ms: float
    ) -> MeanStep:
        """Return what ``mean_step`` would return after ``observe_run``, without observing the
        run."""
        history = self._history.copy()
        _add_run(history, batch, context_tokens, steps, ms, growth_ms)
        return history.mean()


def _add_run(
    history: StepHistory, batch: int, context_tokens: int, steps: int, ms: float, growth_ms: float
) -> None:
    for step in range(max(0, steps - KEPT_STEPS), steps):
        context = context_tokens + step * batch
        history.add(ms + step * growth_ms, batch, context, batch)


class LeapingBudget(PrefillBudget):
    """A ``PrefillBudget`` that also observes a run of identical steps in one call."""

    def __init__(self, costs: StepCosts, slo_s: float) -> None:
        """Create a budget with the arguments of ``PrefillBudget``."""
        super().__init__(costs, slo_s)
        self._leaping_step = LeapingUnitCost(1.0, PRIOR_MS)
        self._step = self._leaping_step

    def observe_run(
        self, batch: int, context_tokens: int, steps: int, ms: float, growth_ms: float
    ) -> None:
        """Observe consecutive identical steps; the arguments are those of
        ``LeapingPlanner.observe_run``.

        None of these steps counts as delayed.
        """
        predicted = self._costs.step_ms(batch, context_tokens)
        growth = self._costs.step_ms(batch, context_tokens + batch) - predicted
        self._leaping_step.observe_run(steps, (predicted, growth), (ms, growth_ms))


class LeapingUnitCost(UnitCost):
    """A ``UnitCost`` that also observes a run of identical steps in one call."""

    def observe_run(
        self, count: int, units: tuple[float, float], seconds: tuple[float, float]
    ) -> None:
        """Observe ``count`` steps in a row, as ``count`` calls of ``observe`` would.

        ``units`` and ``seconds`` are pairs: the value of the first step, and what each further step
        adds to the one before it. The first value is positive, the added one at least 0.
        """
        kept = KEPT**count
        self._units = kept * self._units + _faded(count, *units)
        self._seconds = kept * self._seconds + _faded(count, *seconds)


def _faded(count: int, first: float, growth: float) -> float:
    """Return the weighted sum of ``first + i*growth`` for ``count`` values of i, from 0.

    The weight of each value is ``KEPT`` times that of the next value. The sum consists of a
    geometric and an arithmetico-geometric series.
    """
    rest = 1.0 - KEPT
    weights = (1.0 - KEPT**count) / rest
    lags = KEPT * (1.0 - count * KEPT ** (count - 1) + (count - 1) * KEPT**count) / rest**2
    return (first + (count - 1) * growth) * weights - growth * lags


class LeapingScheduler(Scheduler):
    """A ``Scheduler`` that also runs many identical steps in one call."""

    def identical_steps(self) -> int:
        """Return the number of identical steps that follow now; 0 if there is none.

        The scheduler can process this many results, and make this many plans, and each plan has the
        rows that are in flight now. The caller must add and remove no sequence meanwhile.
        """
        plans, running = self._plans.values(), self.running
        depth, count = len(plans), len(running)
        if self.waiting or self._leaving or any(len(plan.rows) != count for plan in plans):
            return 0
        if not depth or not running or not self._is_steady(depth):
            return 0
        most = min(self._bounds.max_tokens(one) - one.target for one in running)
        available = self.pool.available
        if most <= 0 or self.growth(most) <= available:
            return max(0, most)
        return bisect_right(range(most + 1), available, key=self.growth) - 1

    def leap(self, steps: int, token_of: Callable[[Sequence], int]) -> None:
        """Process the results of ``steps`` steps and make ``steps`` plans. ``steps`` is at most the
        result of ``identical_steps``.

        ``token_of`` gives the token that a sequence gets in each step. The plans in flight keep
        their rows, but these begin ``steps`` tokens later. Blocks become full and are allocated in
        the order of the steps, so the cache has the same content as with single steps.
        """
        running = self.running
        events: list[tuple[int, bool, int]] = []
        computed = [len(one.token_ids) - 1 for one in running]
        for place, sequence in enumerate(running):
            events += self._events(sequence, place, steps)
            sequence.token_ids.extend((token_of(sequence),) * steps)
            sequence.scheduled += steps
            sequence.highest += steps
        for step, is_allocated, place in sorted(events):
            sequence = running[place]
            if is_allocated:
                sequence.block_table = (*sequence.block_table, *self.pool.allocate(1))
            else:
                sequence.computed = computed[place] + step
                self._prefix_cache.register(sequence)
        for sequence in running:
            sequence.computed = len(sequence.token_ids) - 1

    def _events(
        self, sequence: Sequence, place: int, steps: int
    ) -> Iterator[tuple[int, bool, int]]:
        """Yield the events of a sequence in the next ``steps`` steps: a block becomes full (False),
        or a block is allocated (True)."""
        size = self.limits.block_size
        known = len(sequence.token_ids) - 1
        for step in range(size - known % size, steps + 1, size):
            yield step, False, place
        first = len(sequence.block_table) * size - sequence.target + 2
        for step in range(first, steps + 1, size):
            yield step, True, place

    def _is_steady(self, depth: int) -> bool:
        """Whether each of ``depth`` plans in flight gives every running sequence its next token.

        True only if the token's value does not matter.
        """
        limits = self.limits
        if limits.draft_tokens or len(self.running) > limits.chunk_tokens:
            return False
        return all(
            one.in_flight == one.pending == one.scheduled - one.computed == depth
            and one.scheduled - depth >= len(one.spec.token_ids)
            and not (one.prefill_only or one.siblings or one.stop_ids)
            for one in self.running
        )

    def growth(self, steps: int) -> int:
        """Return the number of blocks that running sequences need in ``steps`` steps that are
        identical; 0 for no step."""
        if not steps:
            return 0
        size = self.limits.block_size
        return sum(
            max(0, -(-(one.target - 1 + steps) // size) - len(one.block_table))
            for one in self.running
        )
