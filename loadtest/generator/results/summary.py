"""Computes the figures of a run: percentiles by input length, rates, and the basis of both kinds of
goodput.

Percentiles interpolate linearly between the closest ranks, as `vllm bench serve` and aiperf do.
Pure.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from baton.errors import ConfigError
from loadtest.generator.results.request_record import RequestRecord
from planning.common.slo import Slo

PERCENTILES = (50, 95, 99)
DEFAULT_BOUNDS = (512, 4096)
"""Default upper bounds of the buckets of input lengths, in tokens. They are those of Baton's
default context-length classes."""
_ALL = "all"


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a run whose requests count, without warm-up and cool-down. Its ends are seconds
    from the run's beginning.
    """

    start_s: float
    end_s: float

    @property
    def seconds(self) -> float:
        """Return the window's length in seconds."""
        return self.end_s - self.start_s

    def holds(self, record: RequestRecord) -> bool:
        """Return whether a request counts: its scheduled time of sending is in the window."""
        return self.start_s <= record.due_s < self.end_s


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles of a measure, in milliseconds; all 0 without values."""

    count: int
    mean_ms: float
    p50_ms: float
    p95_ms: float
    p99_ms: float
    max_ms: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Distribution:
        if not len(seconds):
            return cls(0, 0.0, 0.0, 0.0, 0.0, 0.0)
        values = np.asarray(seconds) * 1e3
        p50, p95, p99 = (float(one) for one in np.percentile(values, PERCENTILES))
        return cls(len(values), float(values.mean()), p50, p95, p99, float(values.max()))


@dataclass(frozen=True, slots=True)
class BucketSummary:
    """Figures of the requests in one bucket of input lengths."""

    name: str
    requests: int
    ok: int
    error: int
    shed: int
    aborted: int
    good: int
    """Number of requests that met every SLO."""
    attainment: float
    """Share of requests that met every SLO: good / (ok + error + shed + aborted)."""
    input_tokens: int
    """Number of prompt tokens of successful requests. The fields after this one also cover
    successful requests only."""
    output_tokens: int
    cached_tokens: int
    ttft: Distribution
    tpot: Distribution
    """TPOT of answers with at least two tokens."""
    itl: Distribution
    e2el: Distribution


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of a whole run."""

    window_s: float
    """Length in seconds of the counted part of the run. The rates of this summary are averages over
    it."""
    offered_per_s: float
    """Rate at which requests were scheduled, per second."""
    completed_per_s: float
    goodput_per_s: float
    """Rate of requests that met every SLO, per second."""
    input_tokens_per_s: float
    output_tokens_per_s: float
    all: BucketSummary
    buckets: tuple[BucketSummary, ...]
    """Figures of each bucket of input lengths that has requests, in rising order."""
    lag: Distribution
    """Delay of the client: from the scheduled time of each request to its actual send."""
    codes: dict[str, int]
    """Number of failed requests, by the code of the failure."""


def parse_bounds(text: str) -> tuple[int, ...]:
    """Parse the upper bounds of the buckets of input lengths, such as ``512,4096``.

    Raises ConfigError unless these are rising integers.
    """
    try:
        bounds = tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        bounds = (0,)
    if list(bounds) != sorted({bound for bound in bounds if bound > 0}):
        raise ConfigError(f"{text!r} is not a rising list of token counts, as in 512,4096")
    return bounds


def bucket_names(bounds: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the buckets of input lengths, such as ``<= 512``, ``513 - 4096``, ``>
    4096``."""
    if not bounds:
        return (_ALL,)
    between = [f"{low + 1} - {high}" for low, high in itertools.pairwise(bounds)]
    return (f"<= {bounds[0]}", *between, f"> {bounds[-1]}")


def bucket_of(input_tokens: int, bounds: Sequence[int]) -> int:
    """Return the index of the bucket to which a prompt of ``input_tokens`` belongs."""
    return int(np.searchsorted(bounds, input_tokens, side="left"))


def summarize(
    records: Iterable[RequestRecord],
    window: Window,
    slo: Slo,
    bounds: Sequence[int] = DEFAULT_BOUNDS,
) -> Summary:
    """Return the figures of those requests whose scheduled time of sending is in ``window``."""
    counted = [record for record in records if window.holds(record)]
    parts: list[list[RequestRecord]] = [[] for _ in range(len(bounds) + 1)]
    for record in counted:
        parts[bucket_of(record.input_tokens, bounds)].append(record)
    whole = _bucket(_ALL, counted, slo)
    seconds = max(window.seconds, 1e-9)
    return Summary(
        window_s=window.seconds,
        offered_per_s=whole.requests / seconds,
        completed_per_s=whole.ok / seconds,
        goodput_per_s=whole.good / seconds,
        input_tokens_per_s=whole.input_tokens / seconds,
        output_tokens_per_s=whole.output_tokens / seconds,
        all=whole,
        buckets=tuple(
            _bucket(name, part, slo)
            for name, part in zip(bucket_names(bounds), parts, strict=True)
            if part
        ),
        lag=Distribution.of([record.lag_s for record in counted]),
        codes=dict(Counter(record.code for record in counted if record.outcome != "ok")),
    )


def _bucket(name: str, records: Sequence[RequestRecord], slo: Slo) -> BucketSummary:
    outcomes = Counter(record.outcome for record in records)
    well = [record for record in records if record.outcome == "ok"]
    good = sum(record.met(slo) for record in well)
    return BucketSummary(
        name=name,
        requests=len(records),
        ok=outcomes["ok"],
        error=outcomes["error"],
        shed=outcomes["shed"],
        aborted=outcomes["aborted"],
        good=good,
        attainment=good / len(records) if records else 0.0,
        input_tokens=sum(record.input_tokens for record in well),
        output_tokens=sum(record.output_tokens for record in well),
        cached_tokens=sum(record.cached_tokens for record in well),
        ttft=Distribution.of([record.ttft_s for record in well]),
        tpot=Distribution.of([record.tpot_s for record in well if record.output_tokens > 1]),
        itl=Distribution.of([gap for record in well for gap in record.itl_s]),
        e2el=Distribution.of([record.e2el_s for record in well]),
    )
