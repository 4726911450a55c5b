"""Compares predicted and measured figures of one load, and computes their errors. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.results.summary import Summary, summarize
from loadtest.research.validation.offered_load import OfferedLoad
from planning.common.slo import Slo

LATENCY_AIM, GOODPUT_AIM = 0.15, 0.10
"""Maximum relative error of a predicted latency, and maximum relative error of a predicted
goodput."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One figure of a load, predicted and measured."""

    name: str
    predicted: float
    measured: float
    aim: float

    @property
    def error(self) -> float:
        """Return the error of the prediction, relative to the measurement. It is positive if the
        prediction is too high.
        """
        if not self.measured:
            return 0.0 if not self.predicted else float("inf")
        return self.predicted / self.measured - 1

    @property
    def is_met(self) -> bool:
        """Whether the error of the prediction is within its limit."""
        return abs(self.error) <= self.aim


@dataclass(frozen=True, slots=True)
class Comparison:
    """Comparison of prediction and measurement for one load on one cluster."""

    shape: str
    """Shape of the cluster, such as ``2P2D``."""
    rate: float
    """Requests per second of the load."""
    requests: int
    """Number of requests that count."""
    figures: tuple[Figure, ...]
    attainment: tuple[float, float]
    """Share of requests that met every SLO: the predicted and the measured one."""
    refused: tuple[int, int]
    """Number of requests that the router rejected: the predicted and the measured one."""
    late_ms: float
    """p99 of the client's event-loop lag, in milliseconds."""


def compare(
    shape: str,
    load: OfferedLoad,
    slo: Slo,
    predicted: Sequence[RequestRecord],
    measured: Sequence[RequestRecord],
    late_s: float,
) -> Comparison:
    """Compute predicted and measured figures with the load generator's arithmetic, over the same
    requests.
    """
    said, seen = (summarize(records, load.window, slo, ()) for records in (predicted, measured))
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
"""Names of the compared latencies, which are all in milliseconds."""


def _of(summary: Summary, name: str) -> float:
    what, quantile = name.split()
    distribution = summary.all.ttft if what == "TTFT" else summary.all.tpot
    return distribution.p50_ms if quantile == "p50" else distribution.p95_ms
