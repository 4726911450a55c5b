"""Records the end times of a worker's steps: one entry for each run of equal steps."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepRun:
    """A run: consecutive steps without a pause, each longer than the one before it by a
    constant."""

    first: int
    """Number of the run's first step, counted from 0 over the worker's lifetime."""
    begun_s: float
    step_s: float
    """Duration of the run's first step."""
    growth_s: float = 0.0

    def end_s(self, steps: int) -> float:
        """Return the time at which the first ``steps`` steps of the run have ended."""
        return self.begun_s + steps * self.step_s + self.growth_s * (steps * (steps - 1) / 2)

    def ended_at(self, now: float) -> int:
        """Return how many steps of the run have ended at the time ``now``, as if the run had no
        last step."""
        if now < self.end_s(1):
            return 0
        left = now - self.begun_s
        if self.growth_s <= 0.0:
            steps = int(left / self.step_s)
        else:
            # n*step + growth*n*(n-1)/2 = left
            half = self.step_s - self.growth_s / 2
            root = (half * half + 2 * self.growth_s * left) ** 0.5
            steps = int(2 * left / (half + root))
        # Rounding may be off by one.
        while steps > 0 and self.end_s(steps) > now:
            steps -= 1
        while self.end_s(steps + 1) <= now:
            steps += 1
        return steps


class StepLog:
    """End times of all steps of a worker, in order."""

    def __init__(self) -> None:
        self._runs: list[StepRun] = []
        self._firsts: list[int] = []

    def add(self, run: StepRun) -> None:
        """Record that the steps from ``run.first`` on belong to ``run``, until the next run is
        added.
        """
        if self._firsts and self._firsts[-1] == run.first:
            self._runs[-1] = run
            return
        self._runs.append(run)
        self._firsts.append(run.first)

    def ends_s(self, first: int, last: int) -> Floats:
        """Return the times at which the steps ``first`` to ``last``, inclusive, ended. fp64
        [steps].
        """
        parts: list[Floats] = []
        place = bisect_right(self._firsts, first) - 1
        while first <= last:
            run = self._runs[place]
            ends = self._firsts[place + 1] if place + 1 < len(self._firsts) else last + 1
            until = min(last + 1, ends)
            steps = np.arange(first - run.first + 1, until - run.first + 1, dtype=np.float64)
            parts.append(
                run.begun_s + steps * run.step_s + run.growth_s * (steps * (steps - 1) / 2)
            )
            first, place = until, place + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)
