"""Finds the highest rate with enough good requests, by bisection. Pure.

DistServe (Zhong et al., OSDI 2024) calls this rate the goodput: the highest one at which at least
90 % of requests meet every SLO.
"""

from __future__ import annotations

import math

ATTAINMENT = 0.9
PRECISION = 0.05
_STEP = 2.0
_MIN_SHARE = 1 / 1024
"""Lowest request rate that a search tries, as a share of the first rate that it tried."""


class RateSearch:
    """Searches the highest request rate at which enough requests meet their SLOs.

    The caller takes the next rate, tries it and reports the result, until no rate is left. The
    search doubles the rate while enough requests are good, or halves it until they are. Then it
    halves the interval. Measurements need not be monotone: the result is always a tried rate that
    met the target, below a tried one that missed it.
    """

    def __init__(
        self,
        first_rate: float,
        *,
        attainment: float = ATTAINMENT,
        precision: float = PRECISION,
        max_rate: float = math.inf,
    ) -> None:
        """The search ends when the lowest rate that missed the target is at most 1 + ``precision``
        times the highest rate that met it.

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
        """Return the highest tried rate that met the target, and is below all rates that missed it.
        Return 0 if there is none.
        """
        return self._met

    def next_rate(self) -> float | None:
        """Return the rate to try next. None if the search is over."""
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
        """Record the result of a tried ``rate``. ``attainment`` is the share of its requests that
        met their SLOs."""
        if attainment >= self._attainment:
            self._met = max(self._met, rate)
        else:
            self._failed = min(self._failed, rate)
