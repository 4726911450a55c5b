"""The workers' load snapshots, as all simulated routers see them. Plain Python; owned by the
simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from baton.request import LoadSnapshot
from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.simulated_worker import SimulatedWorker
from router.routing.worker_table import LoadColumns

REFRESH_S = 0.05
REFRESH_S_PER_WORKER = 24e-6
"""Maximum age of a router's table of workers, in seconds: ``REFRESH_S``, or this for each worker if
that is more. A live router refreshes its table for a tenth of its time at most
(``router.routing.route_finder``), and that takes 2.4 us per worker."""

CAPACITY_AGE_S = 0.02
CAPACITY_AGE_S_PER_WORKER = 12e-6
"""Maximum age of a queue's view of the decode workers, in seconds, likewise
(``router.admission.admission_queue``). It takes 1.2 us per decode worker."""


@dataclass(frozen=True, slots=True)
class DecodeRoom:
    """Room at all decode workers, as in ``router.admission.capacity.Capacity``."""

    sequences: int
    max_sequences: int
    available_blocks: int
    max_available_blocks: int
    total_blocks: int
    max_total_blocks: int


class SnapshotBoard:
    """Takes snapshots of the workers' loads, once for all routers.

    A snapshot is at most ``REFRESH_S`` old when a router reads it.
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
        self._room: DecodeRoom | None = None
        self._room_at = -math.inf
        self._unread: list[dict[str, LoadSnapshot]] = [{} for _ in range(readers)]
        self.refresh_every_s = max(REFRESH_S, REFRESH_S_PER_WORKER * len(workers))
        """Seconds between two reads of the same router."""
        self.snapshots_read = 0
        """Number of snapshots that routers have read."""

    def read(self, reader: int) -> LoadColumns:
        """Return the latest snapshots of the workers that changed since the router ``reader`` last
        read."""
        now = self._events.now
        if now - self._taken_at >= REFRESH_S:
            self._taken_at = now
            busy = [
                worker
                for worker in self._workers
                if not worker.is_idle or self._seen.get(worker.name) != worker.changes
            ]
            loads = {worker.name: worker.load() for worker in busy}
            self._seen |= {worker.name: worker.changes for worker in busy}
            for unread in self._unread:
                unread.update(loads)
        found, self._unread[reader] = self._unread[reader], {}
        self.snapshots_read += len(found)
        return LoadColumns.of(found)

    def decode_room(self, decode: Sequence[SimulatedWorker]) -> DecodeRoom:
        """Return the room at the decode workers, which is at most ``capacity_age_s`` old."""
        now = self._events.now
        if self._room is None or now - self._room_at > capacity_age_s(len(decode)):
            available = [worker.available_blocks() for worker in decode]
            total = [worker.pool.total for worker in decode]
            self._room_at = now
            self._room = DecodeRoom(
                sequences=sum(
                    len(worker.scheduler.running) + len(worker.scheduler.waiting)
                    for worker in decode
                ),
                max_sequences=sum(worker.profile.max_sequences for worker in decode),
                available_blocks=sum(available),
                max_available_blocks=max(available, default=0),
                total_blocks=sum(total),
                max_total_blocks=max(total, default=0),
            )
        return self._room

    def forget_room(self) -> None:
        """Forget the room: the decode workers are others now."""
        self._room = None


def capacity_age_s(decode: int) -> float:
    """Return the maximum age of a queue's view of ``decode`` decode workers, in seconds."""
    return max(CAPACITY_AGE_S, CAPACITY_AGE_S_PER_WORKER * decode)
