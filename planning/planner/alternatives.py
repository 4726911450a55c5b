"""Alternatives to a plan for comparison: its neighbors, other kinds at its price, and rules of
thumb."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

from planning.planner.cluster_kind import ClusterKind, Counts
from planning.planner.traffic import PlannedTraffic

LONG_INPUT = 4096
"""Median prompt length above which inputs are long, in tokens, as in Baton's class of that name."""

_ROUNDING = 1e-9
"""Tolerance for rounding when prices are compared, in dollars."""


class Ratio(NamedTuple):
    """Ratio of GPUs that compute prompts to GPUs that decode."""

    prefill: int
    decode: int

    @property
    def name(self) -> str:
        """Return the ratio as text."""
        return f"{self.prefill}:{self.decode}"


LONG_INPUTS = (Ratio(2, 1), Ratio(4, 1))
SHORT_INPUTS = (Ratio(1, 1), Ratio(1, 2))
"""Lowest and highest ratio that rules of thumb recommend for short inputs."""


def median_input(traffic: Sequence[PlannedTraffic]) -> float:
    """Return the length of the median prompt, in tokens."""
    return statistics.median(request.input_tokens for one in traffic for request in one.counted)


def advised(traffic: Sequence[PlannedTraffic]) -> tuple[Ratio, ...]:
    """Return the ratios that rules of thumb recommend for prompts of this traffic's length."""
    return LONG_INPUTS if median_input(traffic) > LONG_INPUT else SHORT_INPUTS


def split(kind: ClusterKind, gpus: int, ratio: Ratio) -> Counts | None:
    """Return the worker counts whose ratio of GPUs is closest to ``ratio``, with at most ``gpus``
    GPUs. None if there are too few GPUs."""
    prefill, decode = kind.prefill.gpus, kind.decode.gpus
    found = [
        Counts(count, (gpus - count * prefill) // decode)
        for count in range(1, (gpus - decode) // prefill + 1)
    ]

    def distance(counts: Counts) -> float:
        is_to = counts.prefill * prefill / (counts.decode * decode)
        return abs(math.log(is_to * ratio.decode / ratio.prefill))

    return min(found, key=distance, default=None)


class Candidate(NamedTuple):
    """An alternative that is not simulated yet: a future row of the plan's table."""

    name: str
    kind: ClusterKind
    counts: Counts


def neighbours(kind: ClusterKind, counts: Counts) -> list[Candidate]:
    """Return the plan's neighbors: clusters with one worker fewer and one more, in each pool."""
    prefill, decode = counts
    found = [
        Candidate("one prefill worker fewer", kind, Counts(prefill - 1, decode)),
        Candidate("one decode worker fewer", kind, Counts(prefill, decode - 1)),
        Candidate("one prefill worker more", kind, Counts(prefill + 1, decode)),
        Candidate("one decode worker more", kind, Counts(prefill, decode + 1)),
    ]
    return [
        one for one in found if one.counts.decode >= 1 and one.counts.prefill >= min(1, prefill)
    ]


def same_money(kinds: Mapping[ClusterKind, Counts], dollars_per_hour: float) -> list[Candidate]:
    """Return clusters of other kinds that cost about as much. The ratio of their pools is that of
    each kind's lower bounds."""
    found = []
    for kind, floor in kinds.items():
        affordable = _affordable(kind, dollars_per_hour + _ROUNDING)
        if affordable:
            counts = min(affordable, key=partial(_distance, floor))
            name = f"same price: {kind.prefill.name} + {kind.decode.name}"
            found.append(Candidate(name, kind, counts))
    return found


def at_ratio(kind: ClusterKind, counts: Counts, ratio: Ratio) -> list[Candidate]:
    """Return a cluster with the same number of GPUs, divided between the pools by a rule of thumb's
    ratio. Empty if there are too few GPUs."""
    found = split(kind, kind.gpus(counts), ratio)
    return [] if found is None else [Candidate(f"wisdom, {ratio.name}", kind, found)]


def colocated(kind: ClusterKind, counts: Counts) -> Candidate:
    """Return a cluster with the same number of GPUs, all in decode workers that compute their own
    prompts.
    """
    count = max(1, kind.gpus(counts) // kind.decode.gpus)
    alike = ClusterKind(kind.decode, kind.decode, kind.transport)
    return Candidate("colocated", alike, Counts(0, count))


def _affordable(kind: ClusterKind, dollars: float) -> list[Counts]:
    """Return the worker counts that cost at most ``dollars`` per hour. There is one for each number
    of prefill workers, with as many decode workers as the remaining money buys."""
    prefill, decode = kind.prefill.price_per_hour, kind.decode.price_per_hour
    return [
        Counts(count, int((dollars - count * prefill) / decode))
        for count in range(1, int((dollars - decode) / prefill) + 1)
    ]


def _distance(wanted: Counts, counts: Counts) -> float:
    return abs(math.log(counts.prefill / counts.decode * wanted.decode / wanted.prefill))
