"""Computes the results of the shifting traffic on one cluster. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table

from loadtest.generator.results.request_record import RequestRecord
from loadtest.generator.results.summary import Window, summarize
from loadtest.research.shifting.scenario import ShiftingTraffic
from planning.common.report import whole_table
from planning.common.slo import Slo

AUTOSCALED = "autoscaler"


@dataclass(frozen=True, slots=True)
class Outcome:
    """Results of one run on one cluster."""

    name: str
    """Name of the cluster: its ratio of roles, such as ``3P3D``, or ``AUTOSCALED``."""
    requests: int
    good: int
    """Number of requests that met both SLOs."""
    refused: int
    failed: int
    goodput_per_s: float
    by_phase: tuple[float, ...]
    """For each phase of the traffic, the share of requests that met both SLOs."""
    late_ms: float = 0.0
    """p99 of the client's event-loop lag in milliseconds; 0 if it was not measured."""


def outcome(
    name: str,
    records: Sequence[RequestRecord],
    traffic: ShiftingTraffic,
    slo: Slo,
    late_s: float = 0.0,
) -> Outcome:
    """Compute the results over all requests, with the load generator's arithmetic."""
    whole = summarize(records, traffic.window, slo, ())
    shares = []
    for phase in traffic.phases():
        window = Window(phase.begins_s, phase.begins_s + phase.load.seconds)
        shares.append(summarize(records, window, slo, ()).all.attainment)
    counts = whole.all
    return Outcome(
        name,
        counts.requests,
        counts.good,
        counts.shed,
        counts.error + counts.aborted,
        whole.goodput_per_s,
        tuple(shares),
        late_s * 1e3,
    )


def gain(found: Sequence[Outcome]) -> float:
    """Return the autoscaler's goodput divided by that of the best fixed ratio."""
    best = max(one.goodput_per_s for one in found if one.name != AUTOSCALED)
    own = next(one.goodput_per_s for one in found if one.name == AUTOSCALED)
    return own / best if best else float("inf")


def table_of(found: Sequence[Outcome], traffic: ShiftingTraffic, title: str) -> Table:
    """Return a table that has one row with the results of each cluster."""
    phases = [phase.kind for phase in traffic.phases()]
    table = whole_table(
        *("workers", "goodput/s", "good", "refused", "failed", *phases, "client late, ms"),
        title=title,
    )
    for one in found:
        table.add_row(
            *(one.name, f"{one.goodput_per_s:.2f}", f"{one.good} of {one.requests}"),
            *(str(one.refused), str(one.failed)),
            *(f"{share:.0%}" for share in one.by_phase),
            f"{one.late_ms:.0f}",
        )
    return table
