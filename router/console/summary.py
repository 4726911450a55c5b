"""``GET /metrics/summary``: the figures of the last minute as one JSON object.

Prometheus keeps histories and has its own query language. This endpoint is for a script, or for a
person with ``curl``. Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from baton.host.background import end_tasks, spawn
from baton.telemetry.metrics import RouterMetrics
from router.console.collector import load_of, read_router
from router.console.rates import CounterWindow, Counts, Key, percentiles, total
from router.workers.worker_link import WorkerLink

WINDOW_S = 60.0
"""Seconds that the figures cover, once the router has been up for that time."""
SAMPLE_S = 5.0
"""Interval between two samples of the counters, in seconds."""
MIN_SAMPLE_S = 1.0
"""Requests to the endpoint within this time, in seconds, share a sample, so that a burst of them
costs as much as one."""


class MetricsSummary(BaseModel):
    """Figures of all processes of this router."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    window_s: float
    """Seconds covered by all figures except `requests_total`: the last minute, or the router's
    uptime if that is less."""
    requests_total: int
    """Requests that have ended since the router started, with any outcome."""
    requests_per_second: float
    """Requests that ended, with any outcome, per second."""
    avg_latency_ms: float | None
    """Mean time from receipt to end of successful requests; null if there were none."""
    p99_latency_ms: float | None
    """99th percentile of the same times, from the buckets of `baton_request_latency_seconds`."""
    tokens_per_second: float
    """Generated tokens per second."""
    batch_utilization: float | None
    """Mean of the decode workers' running sequences divided by their maximum, 0 … 1; null if there
    are no decode workers."""
    cache_hit_rate: float | None
    """Prompt tokens whose KV was found in a cache divided by all prompt tokens, 0 … 1; null if
    there were none."""


@dataclass(frozen=True, slots=True)
class _Fill:
    at: float
    share: float


class SummaryWindow:
    """Samples of counters and of the decode batches' fill, and the figures computed from them.
    Plain data, no clock."""

    def __init__(self) -> None:
        self._window = CounterWindow(WINDOW_S)
        self._fills: list[_Fill] = []
        self._counts: Counts = {}

    def add(self, now: float, counts: Counts, fill: float | None) -> None:
        """Add a sample, later than all samples before it. ``fill`` is None if there are no decode
        workers."""
        self._window.add(now, counts)
        self._counts = counts
        self._fills = [one for one in self._fills if now - one.at < WINDOW_S]
        if fill is not None:
            self._fills.append(_Fill(now, fill))

    def figures(self) -> MetricsSummary:
        """Return the figures at the last sample."""
        seconds, grown = self._window.growth(WINDOW_S)
        buckets: dict[float, float] = {}
        for key, value in grown.items():
            if key[0] == "e2el":
                buckets[float(key[-1])] = buckets.get(float(key[-1]), 0.0) + value
        latencies = percentiles(buckets)
        prompts = total(grown, "prompt_tokens")
        cached = total(grown, "cached_prompt_tokens")
        fills = [one.share for one in self._fills]
        return MetricsSummary(
            window_s=round(seconds, 3),
            requests_total=round(total(self._counts, "requests")),
            requests_per_second=_rate(grown, "requests", seconds),
            avg_latency_ms=None
            if latencies is None
            else round(total(grown, "e2el_sum") * 1e3 / latencies.count, 3),
            p99_latency_ms=None if latencies is None else round(latencies.p99 * 1e3, 3),
            tokens_per_second=_rate(grown, "generated_tokens", seconds),
            batch_utilization=round(sum(fills) / len(fills), 4) if fills else None,
            cache_hit_rate=round(min(1.0, cached / prompts), 4) if prompts else None,
        )


def _rate(grown: Mapping[Key, float], name: str, seconds: float) -> float:
    return round(total(grown, name) / seconds, 3) if seconds > 0 else 0.0


class SummaryApi:
    """Serves ``GET /metrics/summary``, and keeps the metric samples from which it is computed."""

    def __init__(
        self,
        links: Callable[[], Sequence[WorkerLink]],
        metrics: RouterMetrics,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create the endpoint; ``links`` returns the connections to all workers."""
        self._links = links
        self._metrics = metrics
        self._clock = clock
        self._window = SummaryWindow()
        self._sampled_at = float("-inf")
        self._turn = asyncio.Lock()
        self._tasks: list[asyncio.Task[None]] = []

    def mount(self, app: FastAPI) -> None:
        """Add the endpoint to the app."""
        app.add_api_route("/metrics/summary", self.show, tags=["operations"])

    def start(self) -> None:
        """Start taking samples."""
        self._tasks = [spawn(self._run(), "summary")]

    async def close(self) -> None:
        """Stop taking samples."""
        await end_tasks(self._tasks)

    async def show(self) -> MetricsSummary:
        """Return requests, latency, tokens, batches and cache hits of the last minute."""
        await self._sample()
        return self._window.figures()

    async def _run(self) -> None:
        while True:
            await self._sample()
            await asyncio.sleep(SAMPLE_S)

    async def _sample(self) -> None:
        async with self._turn:
            if self._clock() - self._sampled_at < MIN_SAMPLE_S:
                return
            # Reading the metrics of several processes reads files.
            counts, _ = await asyncio.to_thread(read_router, self._metrics)
            self._sampled_at = self._clock()
            self._window.add(self._sampled_at, counts, batch_fill(self._links()))


def batch_fill(links: Sequence[WorkerLink]) -> float | None:
    """Return the decode workers' running sequences divided by their maximum; None without decode
    workers."""
    decode = [link for link in links if link.record.role == "decode"]
    places = sum(link.record.max_sequences for link in decode)
    running = sum(load_of(link).running for link in decode)
    return min(1.0, running / places) if places else None
