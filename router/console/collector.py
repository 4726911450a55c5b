"""Collects snapshots for the console: from links, workers' pages and the router's own metrics.

It also keeps what the console shows of the past: its history and its log of events. Owned by the
router's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from baton.config.cluster import Config
from baton.request import LoadSnapshot
from baton.rpc import convert
from baton.store.supervision import SupervisionReport
from baton.telemetry.metrics import RouterMetrics
from router.access.access import Access
from router.console.events import CertificateWatch, ClusterWatch, EventLog
from router.console.history import History
from router.console.rates import CounterWindow, Key
from router.console.snapshot import (
    WINDOW_S,
    Observation,
    ObservedWorker,
    Snapshot,
    page_counts,
    snapshot_of,
)
from router.console.tenants import tenant_counts
from router.console.worker_page import WorkerPage, WorkerPages
from router.core.accounting import RequestStats
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
_EVENT_COUNTS = {
    "baton_moved_requests_total": ("moved", "reason"),
    "baton_left_out_workers_total": ("left_out", "worker"),
    "baton_key_file_failures_total": ("key_file_failures",),
}
"""The same, for counters whose growth is an event."""
_GAUGES = {
    "baton_active_requests": ("active",),
    "baton_waiting_requests": ("waiting", "tenant"),
}


Supervision = Callable[[], Awaitable[SupervisionReport | None]]
"""Returns the supervisor's status; None if it is unknown."""


async def no_supervision() -> SupervisionReport | None:
    """Return None: no supervisor is known."""
    return None


class SnapshotCollector:
    """Makes snapshots of the cluster, and keeps earlier counts, from which it computes rates."""

    def __init__(
        self,
        cluster: ClusterDispatcher,
        stats: RequestStats,
        config: Config,
        model: str,
        access: Access,
        *,
        what_if: bool,
        supervision: Supervision = no_supervision,
    ) -> None:
        """Create a collector; ``model`` is the served model's name. ``what_if``: whether what-if
        questions are answered."""
        self.events = EventLog()
        self.history = History()
        self._watch = ClusterWatch(self.events)
        self._cluster = cluster
        self._stats = stats
        self._config = config
        self._model = model
        self._refused = access.refused
        self._what_if = what_if
        self._supervision = supervision
        files = {config.tls.fronts, config.tls.of("router")} - {None}
        self._certificates = CertificateWatch(one for one in files if one is not None)
        self._pages = WorkerPages(MetricsPages(config.tls.of("router")))
        self._window = CounterWindow(WINDOW_S)
        self._page_window = CounterWindow(WINDOW_S)
        self._page_counts: dict[Key, float] = {}

    async def snapshot(self, *, watched: bool) -> Snapshot:
        """Make a snapshot, and add it to history and events. Failures of workers do not raise.

        ``watched``: whether a viewer will see it. If not, workers' pages are not read.
        """
        links = self._cluster.workers
        seen = [
            ObservedWorker(link.record, load_of(link), links.is_up(link)) for link in links.all()
        ]
        pages = await self._read_pages(seen) if watched else await self._close_pages()
        # This may read the files of other processes.
        counts, gauges = await asyncio.to_thread(read_router, self._stats.metrics)
        counts |= tenant_counts(self._stats.tenants, self._refused, self._config.tenant_weights)
        self._window.add(time.monotonic(), counts)
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
        files = await asyncio.to_thread(self._certificates.look)
        self._watch.look(look, await self._supervision(), files)
        snapshot = snapshot_of(look, self._window, self._page_window, self._config)
        self.history.add(snapshot)
        return snapshot

    async def _read_pages(self, seen: Sequence[ObservedWorker]) -> dict[str, WorkerPage]:
        slots = {one.record.slot: one.record.metrics_address for one in seen}
        pages = await self._pages.read({slot: slots[slot] for slot in sorted(slots)[:MAX_PAGES]})
        # A worker whose page did not answer keeps its counts: its process did not restart.
        known = {key: value for key, value in self._page_counts.items() if key[1] in slots}
        self._page_counts = known | page_counts(pages)
        self._page_window.add(time.monotonic(), self._page_counts)
        return pages

    async def _close_pages(self) -> dict[str, WorkerPage]:
        """Close the connections to workers' pages, and forget their counts."""
        self._page_window.clear()
        self._page_counts = {}
        await self._pages.close()
        return {}

    async def close(self) -> None:
        """Close all connections."""
        await self._close_pages()


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


def load_of(link: WorkerLink) -> LoadSnapshot:
    """Return the load of a worker that its stream reported last. Before the first report, return
    the load in the registry, which may be a heartbeat old."""
    load = link.engine_load
    return load if isinstance(load, LoadSnapshot) else convert.load_from_proto(load)
