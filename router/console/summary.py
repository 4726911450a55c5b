"""``GET /metrics/summary``: the figures of the last minute as one JSON object.

Prometheus keeps histories and has its own query language. This endpoint is for a script, or for a
person with ``curl``. It reads the samples that the console takes.
"""

from __future__ import annotations

from collections.abc import Mapping

from fastapi import FastAPI
from pydantic import BaseModel, ConfigDict

from router.console.rates import Key, percentiles, total
from router.console.sampler import YOUNG_S, RouterSampler, Samples
from router.console.snapshot import WINDOW_S


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


def summary_of(samples: Samples) -> MetricsSummary:
    """Return the figures at the last sample."""
    seconds, grown = samples.window.growth(WINDOW_S)
    buckets: dict[float, float] = {}
    for key, value in grown.items():
        if key[0] == "e2el":
            buckets[float(key[-1])] = buckets.get(float(key[-1]), 0.0) + value
    latencies = percentiles(buckets)
    prompts = total(grown, "prompt_tokens")
    cached = total(grown, "cached_prompt_tokens")
    fills = [fill for _, fill in samples.fills]
    return MetricsSummary(
        window_s=round(seconds, 3),
        requests_total=round(total(samples.counts, "requests")),
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
    """Serves ``GET /metrics/summary``."""

    def __init__(self, sampler: RouterSampler) -> None:
        self._sampler = sampler

    def mount(self, app: FastAPI) -> None:
        """Add the endpoint to the app."""
        app.add_api_route("/metrics/summary", self.show, tags=["operations"])

    async def show(self) -> MetricsSummary:
        """Return requests, latency, tokens, batches and cache hits of the last minute."""
        return summary_of(await self._sampler.sample(YOUNG_S))
