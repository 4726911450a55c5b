"""The clock by which promises to peers lapse: it advances only while its owner can hear them.

A process that stood still (SIGSTOP, a suspended machine, a blocked event loop) has heard no peer
meanwhile, and its peers may have stood still with it. So the time between two ticks counts for no
more than ``max_s``: a lease of three seconds is three seconds in which the owner listened.

``monotonic`` is in seconds. Owned by one event loop, which ticks it several times in the shortest
lease.
"""

from __future__ import annotations

import time
from collections.abc import Callable


class ListeningClock:
    """Call it for its time, in seconds; it never goes back."""

    def __init__(self, max_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._max_s = max_s
        self._monotonic = monotonic
        self._ticked_at = self._time = monotonic()

    def __call__(self) -> float:
        passed = self._monotonic() - self._ticked_at
        return self._time + min(self._max_s, max(0.0, passed))

    def tick(self) -> None:
        """Note that the owner runs. The owner calls this several times in the shortest lease."""
        self._time = self()
        self._ticked_at = self._monotonic()
