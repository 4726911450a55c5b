"""The prefill token budget: prompt tokens that a step may compute while other sequences decode.

The calibrated costs predict it from the SLO of those sequences. Each prediction is multiplied by
how much longer steps have taken than predicted: a step shares its host with others. Plain Python;
owned by the engine core.
"""

from __future__ import annotations

import math

from engine.scheduling.plan import StepPlan
from worker.costs.step_costs import StepCosts
from worker.costs.unit_cost import UnitCost

MIN_TOKENS = 16
"""A prompt makes at least this progress in each step, whatever it costs the others."""
PRIOR_MS = 50.0
"""Weight of the prediction against the first steps, in milliseconds."""
_MAX_RATIO = 8.0
"""Maximum of measured over expected time: a step that took longer was held up once."""


class PrefillBudget:
    """See the module's text."""

    def __init__(self, costs: StepCosts, slo_s: float) -> None:
        """``slo_s``: maximum seconds of a step with prompts and sequences that decode."""
        self._costs = costs
        self._slo_ms = slo_s * 1e3
        self._step = UnitCost(1.0, PRIOR_MS)
        self._chunk = UnitCost(1.0, PRIOR_MS)

    def max_tokens(self, batch: int, context_tokens: int, start: int) -> int:
        """Maximum tokens of a prompt of which ``start`` are computed, in a step of the others.

        These are ``batch`` sequences that decode, and attend to ``context_tokens`` in all.
        """
        left = self._slo_ms - self._step.unit_s * self._costs.step_ms(batch, context_tokens)
        left /= self._chunk.unit_s
        _, b, c = self._costs.prefill
        # The n with b*n + c*n*(start + n/2) = left, in the form that needs no c.
        linear = b + c * start
        divisor = linear + math.sqrt(linear * linear + 2 * c * max(0.0, left))
        if divisor <= 0:
            return MIN_TOKENS
        return max(MIN_TOKENS, int(2 * left / divisor))

    def observe(self, plan: StepPlan, ms: float) -> None:
        """A step took ``ms`` milliseconds."""
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
