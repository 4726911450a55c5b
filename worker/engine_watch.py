"""Whether the engine goes on: work without progress is a hang, however well the event loop runs.

Time is counted by the ticks of whoever watches, none of which counts for more than ``MOST_TICK_S``:
a process that stood still itself has seen nothing. Pure; ``now`` is monotonic, in seconds. Owned
by the control loop.
"""

from __future__ import annotations

ENGINE_HANG_S = 60.0
"""A worker whose engine has not ended its step after this is of no use any more. Routers leave it
much sooner (``engine_hang_s``); a step of the slowest machine ends sooner."""
MOST_TICK_S = 2.0
"""The most that one tick adds."""


class EngineWatch:
    """See the module's text."""

    def __init__(self, limit_s: float = ENGINE_HANG_S) -> None:
        """An engine hangs that ends no step for ``limit_s``."""
        self._limit_s = limit_s
        self._steps = -1
        self._stood_s = 0.0
        self._at: float | None = None

    def tick(self, steps: int, in_flight: int, now: float) -> bool:
        """Whether the engine hangs, which has ended ``steps`` and was given ``in_flight`` more."""
        passed = 0.0 if self._at is None else min(MOST_TICK_S, now - self._at)
        goes_on = steps != self._steps or not in_flight
        self._at, self._steps = now, steps
        self._stood_s = 0.0 if goes_on else self._stood_s + passed
        return self._stood_s >= self._limit_s
