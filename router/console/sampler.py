"""Samples of the router's counters and of its decode batches, which the console and
``/metrics/summary`` share. Owned by the router's event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from baton.request import LoadSnapshot
from baton.rpc import convert
from baton.telemetry.metrics import RouterMetrics
from router.console import tenants
from router.console.rates import CounterWindow, Counts, Key
from router.console.snapshot import WINDOW_S
from router.workers.worker_link import WorkerLink

YOUNG_S = 1.0
"""Questions share a sample that is younger than this, in seconds: a burst of them costs as much as
one."""
_COUNTS = {
    "baton_requests_total": ("requests", "class", "outcome", "code"),
    "baton_goodput_requests_total": ("goodput_requests", "class"),
    "baton_prompt_tokens_total": ("prompt_tokens", "class"),
    "baton_cached_prompt_tokens_total": ("cached_prompt_tokens", "class"),
    "baton_generated_tokens_total": ("generated_tokens", "class"),
    "baton_tenant_requests_total": (tenants.REQUESTS, "tenant", "outcome", "code"),
    "baton_tenant_tokens_total": (tenants.TOKENS, "tenant", "kind"),
    "baton_cost_dollars_total": ("cost_dollars", "kind"),
    "baton_time_to_first_token_seconds_bucket": ("ttft", "class", "le"),
    "baton_time_per_output_token_seconds_bucket": ("tpot", "class", "le"),
    "baton_inter_token_latency_seconds_bucket": ("itl", "class", "le"),
    "baton_request_latency_seconds_bucket": ("e2el", "class", "le"),
    "baton_request_latency_seconds_sum": ("e2el_sum", "class"),
}
"""For each metric: its name in the console, and the labels that the console keeps."""
_EVENT_COUNTS = {
    "baton_moved_requests_total": ("moved", "reason"),
    "baton_left_out_workers_total": ("left_out", "worker"),
    "baton_readmitted_workers_total": ("readmitted", "worker"),
    "baton_key_file_failures_total": ("key_file_failures",),
    "baton_redis_failures_total": ("redis_failures",),
}
"""The same, for counters whose growth is an event."""
_GAUGES = {
    "baton_active_requests": ("active",),
    "baton_waiting_requests": ("waiting", "tenant"),
}


@dataclass(slots=True)
class Samples:
    """The samples of the last ``WINDOW_S`` seconds. Plain data, no clock."""

    window: CounterWindow = field(default_factory=lambda: CounterWindow(WINDOW_S))
    counts: Counts = field(default_factory=dict)
    """The latest counters, which are also the last sample of the window."""
    gauges: Mapping[Key, float] = field(default_factory=dict)
    """The latest gauges."""
    fills: list[tuple[float, float]] = field(default_factory=list)
    """Times and ``batch_fill`` of the samples that had decode workers."""

    def add(
        self, now: float, counts: Counts, gauges: Mapping[Key, float], fill: float | None
    ) -> None:
        """Add a sample, later than all samples before it. ``fill`` is None if there are no decode
        workers."""
        self.window.add(now, counts)
        self.counts, self.gauges = counts, gauges
        self.fills = [one for one in self.fills if now - one[0] < WINDOW_S]
        if fill is not None:
            self.fills.append((now, fill))


class RouterSampler:
    """Takes the samples. The console takes one at each look, with viewers or without."""

    def __init__(
        self,
        metrics: RouterMetrics,
        links: Callable[[], Sequence[WorkerLink]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``links`` returns the connections to all workers."""
        self._metrics = metrics
        self._links = links
        self._clock = clock
        self._samples = Samples()
        self._sampled_at = float("-inf")
        self._turn = asyncio.Lock()

    async def sample(self, max_age_s: float = 0.0) -> Samples:
        """Take a sample, unless the last one is younger than ``max_age_s`` seconds. Return all
        samples."""
        async with self._turn:
            if self._clock() - self._sampled_at >= max_age_s:
                # Reading the metrics of several processes reads files.
                counts, gauges = await asyncio.to_thread(read_router, self._metrics)
                self._sampled_at = self._clock()
                self._samples.add(self._sampled_at, counts, gauges, batch_fill(self._links()))
            return self._samples


def read_router(metrics: RouterMetrics) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return the router's counters and gauges that the console shows, summed over the processes
    that share a port."""
    counts: dict[Key, float] = {}
    gauges: dict[Key, float] = {}
    of_counts = _COUNTS | _EVENT_COUNTS
    for family in metrics.shown().collect():
        for name, labels, value, *_ in family.samples:
            for table, shown in ((counts, of_counts), (gauges, _GAUGES)):
                if (told := shown.get(name)) is not None:
                    key = (told[0], *(labels[label] for label in told[1:]))
                    table[key] = table.get(key, 0.0) + value
    return counts, gauges


def batch_fill(links: Sequence[WorkerLink]) -> float | None:
    """Return the decode workers' running sequences divided by their maximum; None without decode
    workers."""
    decode = [link for link in links if link.record.role == "decode"]
    places = sum(link.record.max_sequences for link in decode)
    running = sum(load_of(link).running for link in decode)
    return min(1.0, running / places) if places else None


def load_of(link: WorkerLink) -> LoadSnapshot:
    """Return the load of a worker that its stream reported last. Before the first report, return
    the load in the registry, which may be a heartbeat old."""
    load = link.engine_load
    return load if isinstance(load, LoadSnapshot) else convert.load_from_proto(load)
