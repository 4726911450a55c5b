"""Growth of counters over a sliding window, and percentiles of histograms. Plain Python, no clock.

Counters only grow, unless their process restarts: then their whole value counts as growth.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice

Key = tuple[str, ...]
"""Name of a counter, followed by the values of its labels."""
Counts = Mapping[Key, float]


class CounterWindow:
    """The samples of counters in the last ``span_s`` seconds, and the last sample before that
    time."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._samples: deque[tuple[float, Counts]] = deque()

    def add(self, now: float, counts: Counts) -> None:
        """Add a sample of all counters. It must be later than all samples before it."""
        self._samples.append((now, counts))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self._span_s:
            self._samples.popleft()

    def clear(self) -> None:
        """Forget all samples of the counters."""
        self._samples.clear()

    def growth(self, span_s: float) -> tuple[float, dict[Key, float]]:
        """Return a time of about ``span_s`` seconds up to the last sample, in seconds, and how much
        each counter grew in it.

        The time runs from the sample ``span_s`` ago, or the first one, to the last sample. It is 0
        s while there are fewer than two samples. A counter that is new, with its process or a
        label, counts with its whole value.
        """
        if len(self._samples) < 2:
            return 0.0, {}
        now, last = self._samples[-1]
        begun, first = self._samples[0]
        for at, counts in islice(self._samples, len(self._samples) - 1):
            if now - at < span_s:
                break
            begun, first = at, counts
        grown: dict[Key, float] = {}
        for key, value in last.items():
            before = first.get(key, 0.0)
            grown[key] = value - before if value >= before else value
        return now - begun, grown


@dataclass(frozen=True, slots=True)
class Growth:
    """Growth of counters over two times."""

    rate_s: float
    """Seconds over which rates are measured; 0 while there are fewer than two samples."""
    window_s: float
    """Seconds over which percentiles and shares are measured; 0 as above."""
    lately: Mapping[Key, float]
    """Growth of each counter over ``rate_s`` seconds."""
    grown: Mapping[Key, float]
    """Growth of each counter over ``window_s`` seconds."""

    @classmethod
    def of(cls, window: CounterWindow, rate_s: float, window_s: float) -> Growth:
        """Return the growth over about ``rate_s`` and ``window_s`` seconds."""
        real_rate_s, lately = window.growth(rate_s)
        real_window_s, grown = window.growth(window_s)
        return cls(real_rate_s, real_window_s, lately, grown)

    def per_s(self, *begin: str) -> float:
        """Return the rate of all counters whose keys begin with ``begin``."""
        return total(self.lately, *begin) / self.rate_s if self.rate_s > 0 else 0.0


def total(counts: Counts, *begin: str) -> float:
    """Return the sum over all keys that begin with ``begin``."""
    return sum(value for key, value in counts.items() if key[: len(begin)] == begin)


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles of a histogram of seconds.

    They follow ``histogram_quantile`` of Prometheus: values are spread evenly within a bucket, and
    values beyond the last finite bound count as that bound.
    """

    count: int
    """Number of values in the histogram; at least 1."""
    p50: float
    p95: float
    p99: float


def percentiles(buckets: Mapping[float, float]) -> Percentiles | None:
    """Return the percentiles of a histogram. ``buckets`` gives, for each upper bound in seconds,
    the number of values up to the bound.

    The last bound is infinity. Returns None if there are no values.
    """
    bounds = sorted(buckets)
    count = buckets[bounds[-1]] if bounds else 0.0
    if count < 1:
        return None
    p50, p95, p99 = (_quantile(bounds, buckets, share * count) for share in (0.5, 0.95, 0.99))
    return Percentiles(round(count), p50, p95, p99)


def _quantile(bounds: list[float], buckets: Mapping[float, float], rank: float) -> float:
    low, below = 0.0, 0.0
    for bound in bounds:
        held = buckets[bound]
        if held >= rank:
            if math.isinf(bound) or held == below:
                return low
            return low + (bound - low) * (rank - below) / (held - below)
        low, below = bound, held
    return low
