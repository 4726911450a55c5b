"""How long a unit of some work takes: learned from what was done, the latest counting most.

Plain Python.
"""

from __future__ import annotations

_KEPT = 0.8
"""The share of its weight that an observation keeps when the next one comes."""


class Pace:
    """Seconds a unit. Large observations count more than small ones."""

    def __init__(self, unit_s: float, units: float) -> None:
        """Starts as if ``units`` had been seen at ``unit_s`` seconds each. Both are positive."""
        self._units = units
        self._seconds = units * unit_s

    @property
    def unit_s(self) -> float:
        """Seconds a unit, positive."""
        return self._seconds / self._units

    def observe(self, units: float, seconds: float) -> None:
        """So many units took so long. What took no measurable time teaches nothing."""
        if units > 0 and seconds > 0:
            self._units = _KEPT * self._units + units
            self._seconds = _KEPT * self._seconds + seconds

    def observe_run(
        self, count: int, units: tuple[float, float], seconds: tuple[float, float]
    ) -> None:
        """``observe``, ``count`` times in a row.

        Of ``units`` and ``seconds`` each is the first time's, and what each time is more than the
        one before it. All are positive, the growth at least 0.
        """
        kept = _KEPT**count
        self._units = kept * self._units + _faded(count, *units)
        self._seconds = kept * self._seconds + _faded(count, *seconds)


def _faded(count: int, first: float, growth: float) -> float:
    """The sum of ``first + i*growth``, each counting ``_KEPT`` as much as the next one.

    A geometric and an arithmetico-geometric series.
    """
    rest = 1.0 - _KEPT
    weights = (1.0 - _KEPT**count) / rest
    lags = _KEPT * (1.0 - count * _KEPT ** (count - 1) + (count - 1) * _KEPT**count) / rest**2
    return (first + (count - 1) * growth) * weights - growth * lags
