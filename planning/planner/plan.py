"""Defines a plan, and the figures by which plans are compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from baton.config.cluster import Config
from planning.planner.cluster_kind import ClusterKind, Counts
from planning.planner.traffic import PlannedTraffic
from planning.simulator.cluster_shape import ClusterShape
from planning.simulator.results import SimulationResult
from planning.simulator.summary import is_good, summary

_HOUR_S = 3600.0
_MILLION = 1e6


@dataclass(frozen=True, slots=True)
class Figures:
    """Figures of one simulated cluster, over the counted requests.

    Times are in seconds, shares are between 0 and 1, and None means unknown.
    """

    requests: int
    good: int
    """Number of requests that met every SLO."""
    shed: int
    failed: int
    input_tokens: int
    """Prompt tokens of completed requests, cached tokens included."""
    output_tokens: int
    """Output tokens of completed requests."""
    seconds: float
    """Time in which the counted requests arrived, in seconds."""
    attainment: float
    """Share of requests that met every SLO. Over several traces, the lowest of the shares."""
    ttft_p95_s: float | None
    """p95 of TTFT over completed requests, in seconds. Over several traces, the highest of the
    values."""
    tpot_p95_s: float | None
    missed_ttft: float
    """Share of the requests that missed the TTFT SLO, and were neither shed nor failed."""
    missed_tpot: float
    prefill_busy: float | None
    decode_busy: float | None
    prefill_mfu: float | None
    """MFU of the prefill pool, over the time in which its steps ran; see
    docs/explanation/simulator.md. ``decode_mbu`` covers the steps of the decode pool in the same
    way."""
    decode_mbu: float | None

    @property
    def offered_per_s(self) -> float:
        """Return the rate at which requests arrive, per second."""
        return self.requests / max(self.seconds, 1e-9)

    @property
    def goodput_per_s(self) -> float:
        """Return the rate of requests that met every SLO, per second."""
        return self.good / max(self.seconds, 1e-9)

    def dollars_per_million(self, dollars_per_hour: float, tokens: int) -> float | None:
        """Return the price per one million of ``tokens`` tokens, in dollars, if the machines cost
        ``dollars_per_hour`` during the whole time."""
        if not tokens:
            return None
        return dollars_per_hour * self.seconds / _HOUR_S / tokens * _MILLION


def figures_of(
    result: SimulationResult, traffic: PlannedTraffic, shape: ClusterShape, config: Config
) -> Figures:
    """Return the figures of one simulation."""
    pools = summary(result, shape, config)["pools"]
    counted = tuple(one for one in result.requests if one.arrival_s >= traffic.counted_from_s)
    latency = summary(replace(result, requests=counted), shape, config)["latency"]
    done = [one for one in counted if one.ok]
    good = sum(is_good(one, config) for one in counted)
    late = [
        one for one in done if one.ttft_s > config.slo_ttft_of(config.class_of(one.input_tokens))
    ]
    slow = [one for one in done if one.tpot_s > config.slo_tpot_s]
    shed = sum(one.was_shed for one in counted)
    prefill, decode = pools.get("prefill", {}), pools.get("decode", {})
    return Figures(
        requests=len(counted),
        good=good,
        shed=shed,
        failed=len(counted) - len(done) - shed,
        input_tokens=sum(one.input_tokens for one in done),
        output_tokens=sum(one.output_tokens for one in done),
        seconds=traffic.span_s,
        attainment=good / len(counted),
        ttft_p95_s=latency["ttft_s"]["p95"],
        tpot_p95_s=latency["tpot_s"]["p95"],
        missed_ttft=len(late) / len(counted),
        missed_tpot=len(slow) / len(counted),
        prefill_busy=prefill.get("busy_share"),
        decode_busy=decode.get("busy_share"),
        prefill_mfu=prefill.get("mfu_busy"),
        decode_mbu=decode.get("mbu_busy"),
    )


def together(each: Sequence[Figures]) -> Figures:
    """Combine the figures of one cluster over several traces, at least one.

    The cluster served each trace alone.
    """
    if len(each) == 1:
        return each[0]
    total = sum(one.requests for one in each)
    return Figures(
        requests=total,
        good=sum(one.good for one in each),
        shed=sum(one.shed for one in each),
        failed=sum(one.failed for one in each),
        input_tokens=sum(one.input_tokens for one in each),
        output_tokens=sum(one.output_tokens for one in each),
        seconds=sum(one.seconds for one in each),
        attainment=min(one.attainment for one in each),
        ttft_p95_s=_longest([one.ttft_p95_s for one in each]),
        tpot_p95_s=_longest([one.tpot_p95_s for one in each]),
        missed_ttft=sum(one.missed_ttft * one.requests for one in each) / total,
        missed_tpot=sum(one.missed_tpot * one.requests for one in each) / total,
        prefill_busy=_mean(each, lambda one: one.prefill_busy),
        decode_busy=_mean(each, lambda one: one.decode_busy),
        prefill_mfu=_mean(each, lambda one: one.prefill_mfu),
        decode_mbu=_mean(each, lambda one: one.decode_mbu),
    )


def _longest(each: Sequence[float | None]) -> float | None:
    return max((one for one in each if one is not None), default=None)


def _mean(each: Sequence[Figures], of: Callable[[Figures], float | None]) -> float | None:
    """Return the mean of one figure over several traces, weighted by the length of each in time."""
    known = [(value, one.seconds) for one in each if (value := of(one)) is not None]
    if not known:
        return None
    seconds = math.fsum(weight for _, weight in known)
    return math.fsum(value * weight for value, weight in known) / max(seconds, 1e-9)


@dataclass(frozen=True, slots=True)
class PlannedCluster:
    """One row of the plan's table: a cluster, and its figures on the traffic."""

    name: str
    kind: ClusterKind
    counts: Counts
    peak: Figures
    """Figures of the traffic's busiest part."""
    whole: Figures | None = None
    """Figures over all of the traffic; None if it was not simulated."""

    @property
    def gpus(self) -> int:
        """Return the number of GPUs of all workers."""
        return self.kind.gpus(self.counts)

    @property
    def price_per_hour(self) -> float:
        """Return the cluster's price per hour, in dollars."""
        return self.kind.price_per_hour(self.counts)

    @property
    def goodput_per_gpu(self) -> float:
        """Return the number of requests per second that meet every SLO, divided by the number of
        GPUs."""
        return self.peak.goodput_per_s / self.gpus

    @property
    def input_price(self) -> float | None:
        """Return the prefill pool's price per million prompt tokens, in dollars. None if both roles
        share one pool."""
        pool = self.counts.prefill * self.kind.prefill.price_per_hour
        return self.peak.dollars_per_million(pool, self.peak.input_tokens) if pool else None

    @property
    def output_price(self) -> float | None:
        """Return the decode pool's price per million output tokens, in dollars. None if both roles
        share one pool."""
        pool = self.counts.decode * self.kind.decode.price_per_hour
        if not self.counts.prefill:
            return None
        return self.peak.dollars_per_million(pool, self.peak.output_tokens)

    @property
    def token_price(self) -> float | None:
        """Return the price of all workers per million tokens, prompt and output tokens together, in
        dollars.
        """
        return self.price_of_all(self.peak)

    def price_of_all(self, figures: Figures) -> float | None:
        """Return the price of all workers per million tokens, prompt and output together, in
        dollars. The tokens are those counted in ``figures``."""
        tokens = figures.input_tokens + figures.output_tokens
        return figures.dollars_per_million(self.price_per_hour, tokens)


@dataclass(frozen=True, slots=True, order=True)
class BatchSize:
    """A batch size: the limits on sequences and tokens in the workers' steps."""

    max_sequences: int
    """Maximum sequences in a step of a decode worker."""
    chunk_tokens: int
    """Maximum tokens in a step, for all workers."""


@dataclass(frozen=True, slots=True)
class SizeTrial:
    """A simulated batch size, and the highest rate that it serves."""

    size: BatchSize
    rate: float
    """Highest multiple of the peak's rate at which 99 % of the requests meet the SLOs. 0 if no
    multiple that was tried does."""
    figures: Figures | None
    """Figures at the highest rate that meets the SLOs."""


@dataclass(frozen=True, slots=True)
class SizeSearch:
    """Result of the search for the batch size."""

    best: SizeTrial
    own: SizeTrial
    """Trial of the batch size that the workers' own profile defines."""
    tried: int
    """Number of batch sizes that were tried."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Result of the search for a cluster."""

    target: float
    """Required share of good requests."""
    is_met: bool
    chosen: PlannedCluster
    """The cheapest cluster that meets the target. If none does, the best cluster within the
    budget."""
    others: tuple[PlannedCluster, ...]
    twice: Figures
    """Figures of the chosen cluster at twice the peak's rate."""
    sizes: SizeSearch | None
    """Result of the search for the batch size with the highest rate within the SLOs at p99. None if
    the plan does not meet its target."""
    limits: str
    """Reason why the target is not met; empty if it is met."""
    remarks: tuple[str, ...]
    """Reasons why other kinds of clusters were not chosen."""

    @property
    def clusters(self) -> tuple[PlannedCluster, ...]:
        """Return all clusters of the plan, the chosen one first."""
        return (self.chosen, *self.others)

    def frontier(self) -> list[PlannedCluster]:
        """Return the clusters that no other cluster beats in both price and attainment, sorted by
        price."""
        found: list[PlannedCluster] = []
        ranked = sorted(self.clusters, key=lambda one: (one.price_per_hour, -one.peak.attainment))
        for one in ranked:
            if not found or one.peak.attainment > found[-1].peak.attainment:
                found.append(one)
        return found
