"""What a rate will be in a moment: its level and its trend. Pure.

Double exponential smoothing (C. C. Holt, "Forecasting seasonals and trends by exponentially
weighted moving averages", 1957; International Journal of Forecasting 20, 2004) with a trend that
dies away (E. S. Gardner and E. McKenzie, "Forecasting trends in time series", Management Science
31, 1985): a rate that jumps is not taken to go on rising. Readings need not be equally far apart.
"""

from __future__ import annotations

import math

_TREND_WEIGHT = 0.5
"""The trend is learned so much more slowly than the level: a rate that jumps is then overestimated
by a sixth at most, for a few readings."""


class RateForecast:
    """Of any rate, per second."""

    def __init__(self, memory_s: float) -> None:
        """A reading that is so many seconds old counts 1/e, and a trend dies away as fast."""
        self._memory_s = memory_s
        self._level: float | None = None
        self._trend = 0.0
        """Per second."""

    def add(self, rate: float, seconds: float) -> None:
        """What was seen over the last ``seconds``."""
        if self._level is None:
            self._level = rate
            return
        kept = math.exp(-seconds / self._memory_s)
        before, expected = self._level, self._level + self._risen(seconds)
        self._level = max(0.0, expected + (1 - kept) * (rate - expected))
        weight = _TREND_WEIGHT * (1 - kept)
        self._trend += weight * ((self._level - before) / seconds - self._trend)

    def ahead(self, seconds: float) -> float:
        """What is expected in so many seconds, at least 0; a fall is not foreseen, since too few

        workers cost more than too many.
        """
        if self._level is None:
            return 0.0
        return max(0.0, self._level, self._level + self._risen(seconds))

    def _risen(self, seconds: float) -> float:
        """What the trend adds until then, dying away."""
        memory_s = self._memory_s
        return self._trend * memory_s * (1 - math.exp(-seconds / memory_s))
