"""How many requests may be moved because of failures: so that failing workers are not worked to

death by what their failing makes others do.

A token bucket. Requests that come in fill it by a fraction each, time by a little, and a move takes
one out. It is as large as what one worker's death may move at once. Plain Python, ``now`` in
seconds of any one clock; owned by the router's event loop.
"""

from __future__ import annotations


class RetryBudget:
    """See the module's text. It begins full."""

    def __init__(self, ratio: float, burst: float, per_s: float) -> None:
        """``ratio`` moves for each request, ``per_s`` for each second, ``burst`` at most."""
        self._ratio = ratio
        self._burst = burst
        self._per_s = per_s
        self._level = burst
        self._at: float | None = None

    @property
    def level(self) -> float:
        """Moves that were possible when it was last asked."""
        return self._level

    def admitted(self) -> None:
        """A request came in."""
        self._level = min(self._burst, self._level + self._ratio)

    def take(self, now: float) -> bool:
        """Whether a request may be moved; if so it is counted."""
        if self._at is not None:
            gained = max(0.0, now - self._at) * self._per_s
            self._level = min(self._burst, self._level + gained)
        self._at = now
        if self._level < 1.0:
            return False
        self._level -= 1.0
        return True
