"""Keeps the table of workers in step with the links to them.

Owned by the router's event loop.
"""

from __future__ import annotations

from baton.request import LoadSnapshot
from baton.store.registry import WorkerRecord
from router.routing.planner import Planner
from router.workers.worker_links import WorkerLink, WorkerLinks

REFRESH_S = 0.05
"""The table may be this old: with a thousand workers reading all links takes about a millisecond.
What this router itself has promised counts at once."""


class Roster:
    """See the module's text."""

    def __init__(self, planner: Planner, links: WorkerLinks) -> None:
        self._planner = planner
        self._links = links
        self._seen: dict[str, tuple[WorkerRecord, LoadSnapshot]] = {}
        self._refreshed_at = float("-inf")
        self.context_length: int | None = None
        """The least of the workers that are up; None while there is none."""
        self.fingerprint = ""
        """Theirs; empty while there is none."""

    def refresh(self, now: float, *, at_once: bool = False) -> None:
        """Read the links again if the table is old, or ``at_once``. ``now`` in seconds."""
        if not at_once and now - self._refreshed_at < REFRESH_S:
            return
        self._refreshed_at = now
        self.context_length, self.fingerprint = None, ""
        links = self._links.all()
        for link in links:
            self._take(link, now)
        for gone in self._seen.keys() - {link.record.incarnation for link in links}:
            del self._seen[gone]
            self._planner.remove(gone)

    def _take(self, link: WorkerLink, now: float) -> None:
        record, table = link.record, self._planner.table
        name = record.incarnation
        known, load = self._seen.get(name, (None, None))
        if known is not record:
            table.add(record)
        if load is not link.load:
            table.set_load(name, link.load, now * 1e3)
        self._seen[name] = (record, link.load)
        up = self._links.is_usable(link)
        table.set_up(name, up, lends=link.lends(now))
        if up:
            self.fingerprint = record.fingerprint
            longest = self.context_length
            if longest is None or record.context_length < longest:
                self.context_length = record.context_length
