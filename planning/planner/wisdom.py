"""The ratios that people begin with, to be set beside what a search finds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from typing import NamedTuple

from planning.planner.cluster_kind import ClusterKind, Counts
from planning.planner.traffic import Traffic

LONG_INPUT = 4096
"""Tokens of the median prompt above which inputs are called long: Baton's class of that name."""


class Ratio(NamedTuple):
    """GPUs that compute prompts, to GPUs that decode."""

    prefill: int
    decode: int

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.prefill}:{self.decode}"


LONG_INPUTS = (Ratio(2, 1), Ratio(4, 1))
SHORT_INPUTS = (Ratio(1, 1), Ratio(1, 2))
"""Common wisdom's ranges, by their ends."""


def median_input(traffic: Sequence[Traffic]) -> float:
    """Tokens of the median prompt."""
    return statistics.median(request.input_tokens for one in traffic for request in one.counted)


def advised(traffic: Sequence[Traffic]) -> tuple[Ratio, ...]:
    """Where one would begin with such prompts."""
    return LONG_INPUTS if median_input(traffic) > LONG_INPUT else SHORT_INPUTS


def split(kind: ClusterKind, gpus: int, ratio: Ratio) -> Counts | None:
    """The counts of at most ``gpus`` that are nearest to a ratio; None: there are too few."""
    prefill, decode = kind.prefill.gpus, kind.decode.gpus
    found = [
        Counts(count, (gpus - count * prefill) // decode)
        for count in range(1, (gpus - decode) // prefill + 1)
    ]

    def distance(counts: Counts) -> float:
        is_to = counts.prefill * prefill / (counts.decode * decode)
        return abs(math.log(is_to * ratio.decode / ratio.prefill))

    return min(found, key=distance, default=None)
