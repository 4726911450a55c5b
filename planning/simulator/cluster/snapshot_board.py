"""The workers' load snapshots, as all simulated routers see them. Plain Python; owned by the
simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.simulated_worker import SimulatedWorker
from router.routing.worker_table import LoadColumns

REFRESH_S = 0.05
"""Maximum age of a router's table of workers, in seconds, as in
``router.routing.route_finder``."""


class SnapshotBoard:
    """Takes snapshots of the workers' loads, once for all routers.

    A snapshot is at most ``REFRESH_S`` old when a router reads it. With one router, all are taken
    at the moment at which it reads them.
    """

    def __init__(
        self, workers: Sequence[SimulatedWorker], readers: int, events: EventQueue
    ) -> None:
        """Create the board of ``readers`` routers, which are numbered from 0."""
        self._workers = workers
        self._events = events
        self._taken_at = -math.inf
        self._seen: dict[str, int] = {}
        """Number of the last change of each worker that a snapshot includes."""
        self._unread: list[list[LoadColumns]] = [[] for _ in range(readers)]

    def read(self, reader: int) -> Sequence[LoadColumns]:
        """Return the snapshots that changed since the router ``reader`` last read, in the order in
        which they were taken."""
        now = self._events.now
        if now - self._taken_at >= REFRESH_S:
            self._taken_at = now
            busy = [
                worker
                for worker in self._workers
                if not worker.is_idle or self._seen.get(worker.name) != worker.changes
            ]
            loads = LoadColumns.of({worker.name: worker.load() for worker in busy})
            self._seen |= {worker.name: worker.changes for worker in busy}
            for unread in self._unread:
                unread.append(loads)
        found, self._unread[reader] = self._unread[reader], []
        return found
