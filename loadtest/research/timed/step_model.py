"""A model that computes nothing: a step sleeps for as long as a cost model says.

Owned by the engine thread, as any step model is.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.step.step import StepInput, StepOutput
from planning.simulator.costs.step_model import StepCostModel as CostModel
from planning.simulator.costs.step_model import shape_of_rows

PLANNED_AHEAD_S = 0.01
"""A step that is asked for so soon after the last one's end counts as planned before it: its time
begins at that end. A GPU's steps are planned so, and what planning takes does not add up."""
FIRST_TOKEN_ID, TOKEN_IDS = 64, 26
"""Answers are made of these ids: plain tokens in any vocabulary, and the letters a to z in that of
``loadtest.research.timed.model_folder``."""
_CERTAIN = 1e4
"""A logit that any draw takes."""


@dataclass(frozen=True, slots=True)
class StepTiming:
    """What a step asked of the clock, and what it got; all in seconds."""

    asked_s: float
    """What the cost model said."""
    took_s: float
    """From when the step's time began to its end."""
    gap_s: float
    """From the end of the step before to when this one was asked for."""


class TimedStepModel:
    """An implementation of ``engine.step.step.StepModel``."""

    def __init__(
        self,
        costs: CostModel,
        vocab_size: int,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        """``clock`` gives seconds; ``sleep`` takes some, and may take more."""
        self.layers_done = 0
        self._timings: list[StepTiming] = []
        self._costs = costs
        self._vocab_size = vocab_size
        self._clock, self._sleep = clock, sleep
        self._due = 0.0
        """When the last step was to end."""
        self._ended = 0.0
        """When it did."""

    def clear_progress(self) -> None:
        """See ``StepModel``: layers are not told of one by one."""

    def use_threads(self, threads: int) -> None:
        """See ``StepModel``: none is taken."""

    def take_timings(self) -> list[StepTiming]:
        """Of the steps since the last call. Any thread may call it; best when no step runs."""
        taken, self._timings = self._timings, []
        return taken

    def run(self, step: StepInput) -> StepOutput:
        """Sleep, and make tokens up: each a pure function of the one before it and its place.

        So a sequence that is computed again, or elsewhere, gets the tokens that it had.
        """
        self._wait(self._costs.seconds(shape_of_rows(step.rows)))
        best = [FIRST_TOKEN_ID + place % TOKEN_IDS for place in _places(step)]
        if step.greedy:
            return StepOutput(best, None)
        logits = torch.zeros(len(best), self._vocab_size)
        logits[torch.arange(len(best)), torch.tensor(best, dtype=torch.int64)] = _CERTAIN
        return StepOutput(None, logits)

    def _wait(self, seconds: float) -> None:
        now = self._clock()
        gap = now - self._ended
        # Behind the moment that was aimed at, not the one that sleeping ended at: what one step
        # oversleeps is taken from the next.
        begun = self._due if gap < PLANNED_AHEAD_S else now
        self._due = begun + seconds
        left = self._due - now
        if left > 0:
            self._sleep(left)
        self._ended = self._clock()
        self._timings.append(StepTiming(seconds, self._ended - begun, gap))


def _places(step: StepInput) -> list[int]:
    """For each output a number that its token and its place in the sequence decide."""
    positions: list[int] = []
    for row in step.rows:
        positions += range(row.start, row.start + row.count)
    return [31 * step.token_ids[output] + 7 * positions[output] for output in step.outputs]
