"""The events of a simulation, in virtual time. Plain Python."""

from __future__ import annotations

import heapq
from collections.abc import Callable

STEP_END = 0
"""Rank of events that end a step. They run before all other events of the same virtual time, and
arrivals of requests run next."""
ARRIVAL = 1
OTHER = 2


class EventQueue:
    """Actions ordered by virtual time. Actions of the same time are ordered by rank, then by
    insertion.
    """

    def __init__(self) -> None:
        self.now = 0.0
        """Virtual time of the running action, in seconds."""
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[], None], rank: int = OTHER) -> None:
        """Schedule ``action`` at the virtual time ``time_s``, or now if that time has passed."""
        self._count += 1
        heapq.heappush(self._events, (max(time_s, self.now), rank, self._count, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Schedule ``action`` after ``seconds`` of virtual time."""
        self.at(self.now + seconds, action)

    def run(self) -> None:
        """Run the scheduled actions in order, until none is left."""
        while self._events:
            self.now, _, _, action = heapq.heappop(self._events)
            action()
