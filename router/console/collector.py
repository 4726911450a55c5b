"""Collects snapshots for the console: from links, workers' pages and the router's own metrics.

Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import time

from baton.config.cluster import Config
from baton.request import LoadSnapshot
from baton.rpc import convert
from baton.telemetry.metrics import RouterMetrics
from router.console.rates import CounterWindow, Key
from router.console.snapshot import (
    WINDOW_S,
    Observation,
    ObservedWorker,
    Snapshot,
    page_counts,
    snapshot_of,
)
from router.console.worker_page import WorkerPages
from router.dispatch.dispatcher import ClusterDispatcher
from router.http.metrics_pages import MetricsPages
from router.workers.worker_link import WorkerLink

MAX_PAGES = 64
"""Maximum number of workers whose pages are fetched, in the order of their names."""
_COUNTS = {
    "baton_requests_total": ("requests", "class", "outcome", "code"),
    "baton_goodput_requests_total": ("goodput_requests", "class"),
    "baton_prompt_tokens_total": ("prompt_tokens", "class"),
    "baton_cached_prompt_tokens_total": ("cached_prompt_tokens", "class"),
    "baton_generated_tokens_total": ("generated_tokens", "class"),
    "baton_cost_dollars_total": ("cost_dollars", "kind"),
    "baton_time_to_first_token_seconds_bucket": ("ttft", "class", "le"),
    "baton_time_per_output_token_seconds_bucket": ("tpot", "class", "le"),
    "baton_inter_token_latency_seconds_bucket": ("itl", "class", "le"),
    "baton_request_latency_seconds_bucket": ("e2el", "class", "le"),
    "baton_request_latency_seconds_sum": ("e2el_sum", "class"),
}
"""For each metric: its name in the console, and the labels that the console keeps."""
_GAUGES = {
    "baton_active_requests": ("active",),
    "baton_waiting_requests": ("waiting", "tenant"),
}


class SnapshotCollector:
    """Makes snapshots of the cluster. It keeps earlier counts, from which it computes rates, until
    ``clear``."""

    def __init__(
        self,
        cluster: ClusterDispatcher,
        metrics: RouterMetrics,
        config: Config,
        model: str,
        *,
        what_if: bool,
    ) -> None:
        """Create a collector; ``model`` is the served model's name. ``what_if``: whether what-if
        questions are answered."""
        self._cluster = cluster
        self._metrics = metrics
        self._config = config
        self._model = model
        self._what_if = what_if
        self._pages = WorkerPages(MetricsPages(config.tls.of("router")))
        self._window = CounterWindow(WINDOW_S)
        self._page_counts: dict[Key, float] = {}

    async def snapshot(self) -> Snapshot:
        """Make a snapshot. Failures of workers do not raise."""
        links = self._cluster.workers
        seen = [
            ObservedWorker(link.record, load_of(link), links.is_up(link)) for link in links.all()
        ]
        slots = {one.record.slot: one.record.metrics_address for one in seen}
        pages = await self._pages.read({slot: slots[slot] for slot in sorted(slots)[:MAX_PAGES]})
        # This may read the files of other processes.
        counts, gauges = await asyncio.to_thread(read_router, self._metrics)
        # A worker whose page did not answer keeps its counts: its process did not restart.
        known = {key: value for key, value in self._page_counts.items() if key[1] in slots}
        self._page_counts = known | page_counts(pages)
        self._window.add(time.monotonic(), counts | self._page_counts)
        status, reason = self._cluster.health()
        look = Observation(
            at=time.time(),
            model=self._model,
            health=status,
            reason=reason,
            workers=seen,
            pages=pages,
            counts=counts,
            gauges=gauges,
            what_if=self._what_if,
            # The separate listener for operators does not serve the model.
            chat=not self._config.admin_http,
        )
        return snapshot_of(look, self._window, self._config)

    async def clear(self) -> None:
        """Drop earlier counts and close connections, after the last viewer."""
        self._window.clear()
        self._page_counts = {}
        await self._pages.close()


def read_router(metrics: RouterMetrics) -> tuple[dict[Key, float], dict[Key, float]]:
    """Return the router's counters and gauges that the console shows, summed over the processes
    that share a port."""
    counts: dict[Key, float] = {}
    gauges: dict[Key, float] = {}
    for family in metrics.shown().collect():
        for name, labels, value, *_ in family.samples:
            for table, shown in ((counts, _COUNTS), (gauges, _GAUGES)):
                if (told := shown.get(name)) is not None:
                    key = (told[0], *(labels[label] for label in told[1:]))
                    table[key] = table.get(key, 0.0) + value
    return counts, gauges


def load_of(link: WorkerLink) -> LoadSnapshot:
    """Return the load of a worker that its stream reported last. Before the first report, return
    the load in the registry, which may be a heartbeat old."""
    load = link.engine_load
    return load if isinstance(load, LoadSnapshot) else convert.load_from_proto(load)
