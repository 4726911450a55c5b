"""Predicted against measured: the figures of one load, and how far they are apart. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.results.summary import Summary, summarise
from loadtest.research.validation.offered_load import OfferedLoad
from planning.common.slo import Slo

LATENCY_AIM, GOODPUT_AIM = 0.15, 0.10
"""How far a prediction may be from what was measured, as a share of that."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of one load."""

    name: str
    predicted: float
    measured: float
    aim: float

    @property
    def error(self) -> float:
        """Of the measured; positive where too much was predicted."""
        if not self.measured:
            return 0.0 if not self.predicted else float("inf")
        return self.predicted / self.measured - 1

    @property
    def is_met(self) -> bool:
        """Whether the prediction is as good as it is to be."""
        return abs(self.error) <= self.aim


@dataclass(frozen=True, slots=True)
class Comparison:
    """One load on one cluster."""

    shape: str
    """``2P2D``"""
    rate: float
    """Requests a second."""
    requests: int
    """That count."""
    figures: tuple[Figure, ...]
    attainment: tuple[float, float]
    """Share of the requests that met every SLO, predicted and measured."""
    refused: tuple[int, int]
    """Requests that the router turned away, predicted and measured."""
    late_ms: float
    """p99 of the client's event loop."""


def compare(
    shape: str,
    load: OfferedLoad,
    slo: Slo,
    predicted: Sequence[RequestRecord],
    measured: Sequence[RequestRecord],
    late_s: float,
) -> Comparison:
    """Both by the load generator's own arithmetic, over the same requests."""
    said, seen = (summarise(records, load.window, slo, ()) for records in (predicted, measured))
    figures = [Figure(name, _of(said, name), _of(seen, name), LATENCY_AIM) for name in _LATENCIES]
    goodput = Figure("goodput/s", said.goodput_per_s, seen.goodput_per_s, GOODPUT_AIM)
    return Comparison(
        shape=shape,
        rate=load.rate,
        requests=seen.all.requests,
        figures=(*figures, goodput),
        attainment=(said.all.attainment, seen.all.attainment),
        refused=(said.all.shed, seen.all.shed),
        late_ms=late_s * 1e3,
    )


_LATENCIES = ("TTFT p50", "TTFT p95", "TPOT p50", "TPOT p95")
"""All in milliseconds."""


def _of(summary: Summary, name: str) -> float:
    what, quantile = name.split()
    distribution = summary.all.ttft if what == "TTFT" else summary.all.tpot
    return distribution.p50_ms if quantile == "p50" else distribution.p95_ms
