"""The highest rate at which enough requests are good, by bisection. Pure.

DistServe (Zhong et al., OSDI 2024) calls this rate the goodput: the highest one at which at least
90 % of requests meet every SLO.
"""

from __future__ import annotations

import math

ATTAINMENT = 0.9
PRECISION = 0.05
_STEP = 2.0
_MIN_SHARE = 1 / 1024
"""Of the first rate: below it nothing is looked for."""


class RateSearch:
    """Ask for the next rate, try it, tell what came of it; until there is none left.

    It doubles the rate while enough are good, or halves it until they are, and then halves the
    interval. What is measured need not be monotone: what it finds is always a rate that was tried
    and met, below one that was tried and failed.
    """

    def __init__(
        self,
        first_rate: float,
        *,
        attainment: float = ATTAINMENT,
        precision: float = PRECISION,
        max_rate: float = math.inf,
    ) -> None:
        """``precision``: how much higher than the rate that met the one may be that failed.

        Rates above ``max_rate`` are not tried.
        """
        self._first = min(first_rate, max_rate)
        self._attainment = attainment
        self._precision = precision
        self._most = max_rate
        self._met = 0.0
        self._failed = math.inf

    @property
    def best(self) -> float:
        """The highest rate that met so far, below all that failed; 0 where none has."""
        return self._met

    def next_rate(self) -> float | None:
        """Requests a second to be tried now; None: the search is over."""
        if self._failed == math.inf:
            if not self._met:
                return self._first
            return None if self._met >= self._most else min(self._met * _STEP, self._most)
        if not self._met:
            lower = self._failed / _STEP
            return lower if lower >= self._first * _MIN_SHARE else None
        if self._failed <= self._met * (1 + self._precision):
            return None
        return (self._met + self._failed) / 2

    def tell(self, rate: float, attainment: float) -> None:
        """``attainment`` of the requests at ``rate`` were good."""
        if attainment >= self._attainment:
            self._met = max(self._met, rate)
        else:
            self._failed = min(self._failed, rate)
