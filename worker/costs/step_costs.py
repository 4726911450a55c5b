"""Cost models: milliseconds of an engine's steps, and seconds per unit of other work.

Plain Python and numpy: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

KEPT = 0.8
"""Share of its weight that an earlier observation keeps when another observation is added."""


class UnitCost:
    """Learns the seconds per unit of some work. Large observations count more than small ones."""

    def __init__(self, unit_s: float, units: float) -> None:
        """Start with ``unit_s`` seconds per unit, as if that had been observed for ``units`` units.
        Both are positive."""
        self._units = units
        self._seconds = units * unit_s

    @property
    def unit_s(self) -> float:
        """Learned seconds per unit, positive."""
        return self._seconds / self._units

    def observe(self, units: float, seconds: float) -> None:
        """Record that ``units`` units took ``seconds``. An observation of zero is ignored."""
        if units > 0 and seconds > 0:
            self._units = KEPT * self._units + units
            self._seconds = KEPT * self._seconds + seconds


Coefficients = tuple[float, float, float]
"""Coefficients (a, b, c) of ``a + b*x + c*y`` milliseconds."""
UNKNOWN: Coefficients = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """Cost models of an engine's steps, in the form that ``baton.store.registry.WorkerRecord``
    has."""

    prefill: Coefficients = UNKNOWN
    """Coefficients (a, b, c) for the milliseconds of n prompt tokens that attend to ``context``
    tokens on average: a + b*n + c*n*context."""
    step: Coefficients = UNKNOWN
    """Coefficients of the milliseconds for a step in which ``batch`` sequences decode: a + b*batch
    + c*context_tokens."""

    def step_ms(self, batch: float, context_tokens: float) -> float:
        """Predict the milliseconds of a step in which ``batch`` sequences decode. They attend to
        ``context_tokens`` tokens in total."""
        a, b, c = self.step
        return a + b * batch + c * context_tokens

    def chunk_ms(self, count: float, start: float) -> float:
        """Predict how many milliseconds ``count`` prompt tokens add to a step, if ``start`` tokens
        of the prompt were computed before."""
        _, b, c = self.prefill
        return b * count + c * count * (start + count / 2)


def fit(points: Sequence[tuple[float, float]], ms: Sequence[float]) -> Coefficients:
    """Return the non-negative (a, b, c) that minimize the sum of squared relative errors.

    ``points`` are (x, y), and ``ms`` are the positive milliseconds measured at each point. Errors
    are relative, because measured times scatter in proportion to their size. The solution of a
    non-negative least squares problem is the unconstrained solution over some of the columns
    (Lawson and Hanson, Solving Least Squares Problems, 1974, chapter 23). With three columns, all
    choices are tried. Without points, all three are zero.
    """
    if not points:
        return UNKNOWN
    measured = np.asarray(ms, dtype=np.float64)
    columns = np.column_stack([np.ones(len(points)), np.asarray(points, dtype=np.float64)])
    # Scales the columns to one size, so that large numbers of tokens cost no precision.
    sizes = np.maximum(np.abs(columns).max(axis=0), 1.0)
    weighted = columns / sizes / measured[:, None]
    best, least = np.zeros(3), np.inf
    for count in range(1, min(3, len(points)) + 1):
        for chosen in combinations(range(3), count):
            part, *_ = np.linalg.lstsq(weighted[:, chosen], np.ones(len(points)), rcond=None)
            error = float(np.sum((weighted[:, chosen] @ part - 1.0) ** 2))
            if (part >= 0).all() and error < least - 1e-12:
                best, least = np.zeros(3), error
                best[list(chosen)] = part
    a, b, c = (best / sizes).tolist()
    return a, b, c
