"""The latest steps in which every sequence decoded: what they held, and how long they took.

Plain Python; owned by the control loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.plan import StepPlan

_KEPT = 16


@dataclass(frozen=True, slots=True)
class MeanStep:
    """What the kept steps are on average; zeros where there is none."""

    ms: float = 0.0
    batch: float = 0.0
    context_tokens: float = 0.0


class StepHistory:
    """See the module's text."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, int]] = deque(maxlen=_KEPT)

    def observe(self, plan: StepPlan, ms: float) -> None:
        """A step ended ``ms`` milliseconds after the one before it, or after it was asked for."""
        if plan.decodes_only:
            context_tokens = sum(row.start + 1 for row in plan.rows)
            self._steps.append((ms, len(plan.rows), context_tokens))

    def mean(self) -> MeanStep:
        """Of the kept steps."""
        if not self._steps:
            return MeanStep()
        count = len(self._steps)
        ms, batch, context_tokens = (sum(column) for column in zip(*self._steps, strict=True))
        return MeanStep(ms / count, batch / count, context_tokens / count)
