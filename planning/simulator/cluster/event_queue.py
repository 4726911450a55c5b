"""What happens when, in virtual time. Plain Python."""

from __future__ import annotations

import heapq
from collections.abc import Callable

STEP_END = 0
"""Ends of steps come before whatever else happens at the same moment."""
OTHER = 1


class EventQueue:
    """Actions in the order of their times; of equal ones in that of their ranks, then of asking."""

    def __init__(self) -> None:
        self.now = 0.0
        """Seconds; the time of the action that runs."""
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, time_s: float, action: Callable[[], None], rank: int = OTHER) -> None:
        """Let ``action`` happen at ``time_s``, or now where that has passed."""
        self._count += 1
        heapq.heappush(self._events, (max(time_s, self.now), rank, self._count, action))

    def after(self, seconds: float, action: Callable[[], None]) -> None:
        """Let ``action`` happen in so many seconds."""
        self.at(self.now + seconds, action)

    def run(self) -> None:
        """Until nothing is left to happen."""
        while self._events:
            self.now, _, _, action = heapq.heappop(self._events)
            action()
