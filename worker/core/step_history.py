"""The latest steps in which every sequence decoded: what they held, and how long they took.

Where drafts were right a step brings a sequence several tokens. What a router wants to know is the
time from one token to the next, so the milliseconds are those of as many tokens as there were
sequences: of one token each. Plain Python; owned by the engine core.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from engine.scheduling.plan import StepPlan, StepResult

KEPT = 16
"""Steps that the mean is of."""


@dataclass(frozen=True, slots=True)
class MeanStep:
    """What the kept steps are on average; zeros where there is none."""

    ms: float = 0.0
    """For one token of each sequence."""
    batch: float = 0.0
    context_tokens: float = 0.0


class StepHistory:
    """See the module's text."""

    def __init__(self) -> None:
        self._steps: deque[tuple[float, int, int, int]] = deque(maxlen=KEPT)

    def observe(self, plan: StepPlan, result: StepResult, ms: float) -> None:
        """A step ended ``ms`` milliseconds after the one before it, or after it was asked for."""
        if plan.decodes_only:
            context_tokens = sum(row.start + 1 for row in plan.rows)
            batch = len(plan.rows)
            self.add(ms, batch, context_tokens, batch + result.accepted)

    def add(self, ms: float, batch: int, context_tokens: int, tokens: int) -> None:
        """Add a step that brought ``batch`` sequences ``tokens`` tokens in ``ms`` milliseconds."""
        self._steps.append((ms, batch, context_tokens, tokens))

    def mean(self) -> MeanStep:
        """Of the kept steps."""
        if not self._steps:
            return MeanStep()
        count = len(self._steps)
        ms, batch, context_tokens, tokens = (
            sum(column) for column in zip(*self._steps, strict=True)
        )
        return MeanStep(ms / count * batch / tokens, batch / count, context_tokens / count)
