"""How many prompt tokens a step may compute beside sequences that decode: what their SLO leaves.

Predicted by the calibrated costs, each times how much longer steps have taken than predicted: a
step shares its host with others. Plain Python; owned by the engine core.
"""

from __future__ import annotations

import math

from engine.scheduling.plan import StepPlan
from worker.costs.pace import Pace
from worker.costs.step_costs import StepCosts

MIN_TOKENS = 16
"""A prompt makes at least this progress in each step, whatever it costs the others."""
PRIOR_MS = 50.0
"""How much of predicted time the prediction counts for beside the first steps."""
_MOST = 8.0
"""A step that took more than this many times what was expected was held up once: it counts so."""


class ChunkSlack:
    """See the module's text."""

    def __init__(self, costs: StepCosts, slo_s: float) -> None:
        """``slo_s`` is the longest that a step with both may take, in seconds."""
        self._costs = costs
        self._slo_ms = slo_s * 1e3
        self._step = Pace(1.0, PRIOR_MS)
        self._chunk = Pace(1.0, PRIOR_MS)

    def max_tokens(self, batch: int, context_tokens: int, start: int) -> int:
        """Prompt tokens behind ``start`` others, beside ``batch`` sequences that decode and attend

        to ``context_tokens`` in all.
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
        """A step took so long."""
        decoding = [row for row in plan.rows if row.count == 1]
        context_tokens = sum(row.start + 1 for row in decoding)
        step_ms = self._costs.step_ms(len(decoding), context_tokens)
        if plan.decodes_only:
            _learn(self._step, step_ms, ms)
        elif decoding:
            chunks = [row for row in plan.rows if row.count > 1]
            chunk_ms = sum(self._costs.chunk_ms(row.count, row.start) for row in chunks)
            _learn(self._chunk, chunk_ms, ms - self._step.unit_s * step_ms)


def _learn(pace: Pace, predicted_ms: float, ms: float) -> None:
    pace.observe(predicted_ms, min(ms, _MOST * pace.unit_s * predicted_ms))
