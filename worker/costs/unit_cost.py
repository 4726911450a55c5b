"""Seconds for a unit of some work, learned from what was done; the latest counts most.

Plain Python.
"""

from __future__ import annotations

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
