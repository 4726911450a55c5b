"""How often a part of the cluster may be started again, and after what pause."""

from __future__ import annotations

from collections import deque

_MOST = 5
_WINDOW_S = 60.0
_FIRST_PAUSE_S = 0.2


class Restarts:
    """Counts deaths within the last minute. ``now`` is monotonic, in seconds."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()

    def pause(self, now: float) -> float | None:
        """Seconds to wait before the next start; None when there were too many deaths."""
        while self._deaths and now - self._deaths[0] > _WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > _MOST:
            return None
        return float(_FIRST_PAUSE_S * 2 ** (len(self._deaths) - 1))
