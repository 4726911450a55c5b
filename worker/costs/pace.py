"""How long a unit of some work takes: learned from what was done, the latest counting most.

Plain Python.
"""

from __future__ import annotations

KEPT = 0.8
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
            self._units = KEPT * self._units + units
            self._seconds = KEPT * self._seconds + seconds
