"""What an engine's steps cost in milliseconds, and other work in seconds a unit.

Plain Python and numpy: numbers in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

KEPT = 0.8
"""The share of its weight that an observation keeps when the next one comes."""


class UnitCost:
    """Seconds for a unit. Large observations count more than small ones."""

    def __init__(self, unit_s: float, units: float) -> None:
        """Start as if ``units`` had taken ``unit_s`` seconds each. Both are positive."""
        self._units = units
        self._seconds = units * unit_s

    @property
    def unit_s(self) -> float:
        """Seconds for a unit, positive."""
        return self._seconds / self._units

    def observe(self, units: float, seconds: float) -> None:
        """``units`` took ``seconds``. An observation of zero is ignored."""
        if units > 0 and seconds > 0:
            self._units = KEPT * self._units + units
            self._seconds = KEPT * self._seconds + seconds


Coefficients = tuple[float, float, float]
"""a, b, c of ``a + b*x + c*y`` milliseconds."""
UNKNOWN: Coefficients = (0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class StepCosts:
    """As ``baton.store.registry.WorkerRecord`` has them."""

    prefill: Coefficients = UNKNOWN
    """Of n prompt tokens that attend to ``context`` on average: a + b*n + c*n*context."""
    step: Coefficients = UNKNOWN
    """Of a step in which ``batch`` sequences decode: a + b*batch + c*context_tokens."""

    def step_ms(self, batch: float, context_tokens: float) -> float:
        """Of a step in which every sequence decodes."""
        a, b, c = self.step
        return a + b * batch + c * context_tokens

    def chunk_ms(self, count: float, start: float) -> float:
        """What ``count`` prompt tokens behind ``start`` others add to a step."""
        _, b, c = self.prefill
        return b * count + c * count * (start + count / 2)


def fit(points: Sequence[tuple[float, float]], ms: Sequence[float]) -> Coefficients:
    """The non-negative a, b, c with the least sum of squared relative errors.

    ``points`` are (x, y), ``ms`` the positive milliseconds measured there, as many. Relative,
    because that is how measured times scatter. A non-negative least squares problem's solution is
    the plain solution over some of the columns (Lawson and Hanson, Solving Least Squares Problems,
    1974, chapter 23); with three columns all choices are tried. Without points all are zero.
    """
    if not points:
        return UNKNOWN
    measured = np.asarray(ms, dtype=np.float64)
    columns = np.column_stack([np.ones(len(points)), np.asarray(points, dtype=np.float64)])
    # Of one size, so that the numbers of tokens do not spoil the precision.
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
