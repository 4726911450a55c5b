"""The workers' load snapshots, as all simulated routers see them. Plain Python; owned by the
simulation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from planning.simulator.cluster.event_queue import EventQueue
from planning.simulator.cluster.simulated_worker import SimulatedWorker
from router.routing.worker_table import LoadColumns

REFRESH_S = 0.05
"""Maximum age of a router's table of workers, in seconds, as in
``router.routing.route_finder``."""

CAPACITY_AGE_S = 0.02
"""Interval at which a queue is examined while nothing else happens, in seconds. Also the maximum
age of the queue's view of the workers. It is the same as in
``router.admission.admission_queue``."""


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
        self._room: DecodeRoom | None = None
        self._room_at = -math.inf
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

    def decode_room(self, decode: Sequence[SimulatedWorker]) -> DecodeRoom:
        """Return the room at the decode workers, which is at most ``CAPACITY_AGE_S`` old."""
        now = self._events.now
        if self._room is None or now - self._room_at > CAPACITY_AGE_S:
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
