"""Collects snapshots for the console: from links, workers' pages and samples of the router.

It also keeps what the console shows of the past: its history and its log of events. Owned by the
router's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from baton.config.cluster import Config
from baton.store.supervision import SupervisionReport
from router.console.events import CertificateWatch, ClusterWatch, EventLog
from router.console.history import History
from router.console.rates import CounterWindow, Key
from router.console.sampler import RouterSampler, load_of
from router.console.snapshot import (
    WINDOW_S,
    Observation,
    ObservedWorker,
    Snapshot,
    page_counts,
    snapshot_of,
)
from router.console.worker_page import WorkerPage, WorkerPages
from router.dispatch.dispatcher import ClusterDispatcher
from router.http.metrics_pages import MetricsPages

MAX_PAGES = 64
"""Maximum number of workers whose pages are fetched, in the order of their names."""

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
        sampler: RouterSampler,
        config: Config,
        model: str,
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
        self._sampler = sampler
        self._config = config
        self._model = model
        self._what_if = what_if
        self._supervision = supervision
        files = {config.tls.fronts, config.tls.of("router")} - {None}
        self._certificates = CertificateWatch(one for one in files if one is not None)
        self._pages = WorkerPages(MetricsPages(config.tls.of("router")))
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
        samples = await self._sampler.sample()
        status, reason = self._cluster.health()
        look = Observation(
            at=time.time(),
            model=self._model,
            health=status,
            reason=reason,
            workers=seen,
            pages=pages,
            counts=samples.counts,
            gauges=samples.gauges,
            what_if=self._what_if,
            # The separate listener for operators does not serve the model.
            chat=not self._config.admin_http,
        )
        files = await asyncio.to_thread(self._certificates.look)
        self._watch.look(look, await self._supervision(), files)
        snapshot = snapshot_of(look, samples.window, self._page_window, self._config)
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
