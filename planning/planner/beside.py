"""What is set beside a plan: its neighbours, other kinds at its price, and what one would guess."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from typing import NamedTuple

from planning.planner.cluster_kind import ClusterKind, Counts
from planning.planner.wisdom import Ratio, split

_ROUNDING = 1e-9
"""Of dollars."""


class Candidate(NamedTuple):
    """A line of the table that is still to be simulated."""

    name: str
    kind: ClusterKind
    counts: Counts


def neighbours(kind: ClusterKind, counts: Counts) -> list[Candidate]:
    """One worker fewer and one more, in each pool."""
    prefill, decode = counts
    found = [
        Candidate("one prefill worker fewer", kind, Counts(prefill - 1, decode)),
        Candidate("one decode worker fewer", kind, Counts(prefill, decode - 1)),
        Candidate("one prefill worker more", kind, Counts(prefill + 1, decode)),
        Candidate("one decode worker more", kind, Counts(prefill, decode + 1)),
    ]
    return [one for one in found if min(one.counts) >= 1]


def same_money(kinds: Mapping[ClusterKind, Counts], dollars_per_hour: float) -> list[Candidate]:
    """Other kinds, with what the price buys in the ratio of their floors."""
    found = []
    for kind, floor in kinds.items():
        affordable = _affordable(kind, dollars_per_hour + _ROUNDING)
        if affordable:
            counts = min(affordable, key=partial(_distance, floor))
            name = f"same price: {kind.prefill.name} + {kind.decode.name}"
            found.append(Candidate(name, kind, counts))
    return found


def at_ratio(kind: ClusterKind, counts: Counts, ratio: Ratio) -> list[Candidate]:
    """As many GPUs in a ratio of common wisdom, where there are enough for it."""
    found = split(kind, kind.gpus(counts), ratio)
    return [] if found is None else [Candidate(f"wisdom, {ratio.name}", kind, found)]


def colocated(kind: ClusterKind, counts: Counts) -> Candidate:
    """As many GPUs in decode workers, each of which computes the prompts that it decodes."""
    count = max(1, kind.gpus(counts) // kind.decode.gpus)
    alike = ClusterKind(kind.decode, kind.decode, kind.transport)
    return Candidate("colocated", alike, Counts(0, count))


def _affordable(kind: ClusterKind, dollars: float) -> list[Counts]:
    """With each number of prefill workers as many decode workers as are left money for."""
    prefill, decode = kind.prefill.price_per_hour, kind.decode.price_per_hour
    return [
        Counts(count, int((dollars - count * prefill) / decode))
        for count in range(1, int((dollars - decode) / prefill) + 1)
    ]


def _distance(wanted: Counts, counts: Counts) -> float:
    return abs(math.log(counts.prefill / counts.decode * wanted.decode / wanted.prefill))
