"""What a plan is."""

from __future__ import annotations

from dataclasses import dataclass

from planning.planner.batch_size import SizeSearch
from planning.planner.cluster_kind import ClusterKind, Counts
from planning.planner.figures import Figures


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """One line of the table: so many workers, and what they make of the traffic."""

    name: str
    kind: ClusterKind
    counts: Counts
    peak: Figures
    """Of the traffic's busiest part."""
    whole: Figures | None = None
    """Of all of it; None: it was not served."""

    @property
    def gpus(self) -> int:
        """Of all workers."""
        return self.kind.gpus(self.counts)

    @property
    def price_per_hour(self) -> float:
        """Dollars."""
        return self.kind.price_per_hour(self.counts)

    @property
    def goodput_per_gpu(self) -> float:
        """Good requests per second and GPU."""
        return self.peak.goodput_per_s / self.gpus

    @property
    def input_price(self) -> float | None:
        """Dollars for a million tokens of prompts, of the prefill pool; None: both in one."""
        pool = self.counts.prefill * self.kind.prefill.price_per_hour
        return self.peak.dollars_per_million(pool, self.peak.input_tokens) if pool else None

    @property
    def output_price(self) -> float | None:
        """Dollars for a million tokens of answers, of the decode pool; None: both in one."""
        pool = self.counts.decode * self.kind.decode.price_per_hour
        if not self.counts.prefill:
            return None
        return self.peak.dollars_per_million(pool, self.peak.output_tokens)

    @property
    def token_price(self) -> float | None:
        """Dollars for a million tokens of both, of all workers."""
        return self.price_of_all(self.peak)

    def price_of_all(self, figures: Figures) -> float | None:
        """The same, of what ``figures`` count."""
        tokens = figures.input_tokens + figures.output_tokens
        return figures.dollars_per_million(self.price_per_hour, tokens)


@dataclass(frozen=True, slots=True)
class Plan:
    """What was found."""

    target: float
    """Share of requests that are to be good."""
    is_met: bool
    chosen: PlannedCluster
    """The cheapest that meets the target; where none does, the best that the budget allows."""
    others: tuple[PlannedCluster, ...]
    twice: Figures
    """Of the chosen one at twice the peak's rate."""
    sizes: SizeSearch | None
    """The batch that serves most within the p99 SLOs; None where the target is not met."""
    limits: str
    """What keeps the target from being met; empty where it is."""
    remarks: tuple[str, ...]
    """Why other kinds were not taken."""

    @property
    def clusters(self) -> tuple[PlannedCluster, ...]:
        """All of them, the chosen one first."""
        return (self.chosen, *self.others)

    def frontier(self) -> list[PlannedCluster]:
        """Those that nobody else beats in price and attainment, by their price."""
        found: list[PlannedCluster] = []
        ranked = sorted(self.clusters, key=lambda one: (one.price_per_hour, -one.peak.attainment))
        for one in ranked:
            if not found or one.peak.attainment > found[-1].peak.attainment:
                found.append(one)
        return found
