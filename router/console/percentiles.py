"""Percentiles of what a histogram has seen, as ``histogram_quantile`` of Prometheus has them.

Plain Python. Within a bucket values are taken to be spread evenly; what is beyond the last bound is
taken to be at it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Seconds."""

    count: int
    """How many values they are of; at least 1."""
    p50: float
    p95: float
    p99: float


def percentiles(buckets: Mapping[float, float]) -> Percentiles | None:
    """``buckets``: how many values were at most so many seconds, by that bound; the last is

    infinity. None where there are no values.
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
