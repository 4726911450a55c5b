"""Records the end times of a worker's steps: one entry for each run of equal steps."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Steps = npt.NDArray[np.intp]


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
        self._columns: tuple[Steps, Floats, Floats, Floats] | None = None
        """The fields of ``_runs`` as arrays; None after a run was added."""

    def add(self, run: StepRun) -> None:
        """Record that the steps from ``run.first`` on belong to ``run``, until the next run is
        added.
        """
        self._columns = None
        if self._runs and self._runs[-1].first == run.first:
            self._runs[-1] = run
        else:
            self._runs.append(run)

    def ends_s(self, first: int, last: int) -> Floats:
        """Return the times at which the steps ``first`` to ``last``, inclusive, ended. fp64
        [steps].
        """
        firsts, begun_s, step_s, growth_s = self._read()
        numbers = np.arange(first, last + 1)
        run = firsts.searchsorted(numbers, side="right") - 1
        steps = (numbers - firsts[run] + 1).astype(np.float64)
        ends_s: Floats = begun_s[run] + steps * step_s[run]
        ends_s += growth_s[run] * (steps * (steps - 1) / 2)
        return ends_s

    def _read(self) -> tuple[Steps, Floats, Floats, Floats]:
        if self._columns is None:
            runs = self._runs
            self._columns = (
                np.array([run.first for run in runs]),
                np.array([run.begun_s for run in runs]),
                np.array([run.step_s for run in runs]),
                np.array([run.growth_s for run in runs]),
            )
        return self._columns
