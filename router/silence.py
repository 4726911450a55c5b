"""How long workers that should speak have said nothing.

Silence is counted by the ticks of whoever listens, and no tick counts for more than
``MOST_TICK_S``: a listener that was held up itself has heard nobody meanwhile. Plain Python,
``now`` in seconds of any one clock; owned by the router's event loop.
"""

from __future__ import annotations

from collections.abc import Mapping

MOST_TICK_S = 0.25
"""The most that one tick adds."""


class SilenceWatch:
    """See the module's text."""

    def __init__(self, limit_s: float) -> None:
        """Who is silent for ``limit_s`` is taken to hang."""
        self._limit_s = limit_s
        self._heard: dict[str, int] = {}
        self._silent_s: dict[str, float] = {}
        self._at: float | None = None

    def tick(self, expected: Mapping[str, int], now: float) -> list[str]:
        """``expected``: of each worker that should speak, how many messages have come of it.

        Returns those whose silence has come to the limit, again and again each time that it has
        grown by as much. Who is not expected to speak is not silent.
        """
        passed = 0.0 if self._at is None else min(MOST_TICK_S, max(0.0, now - self._at))
        self._at = now
        found = []
        silent: dict[str, float] = {}
        for name, messages in expected.items():
            before = self._silent_s.get(name)
            if before is None or self._heard[name] != messages:
                silent[name] = 0.0
                continue
            silent[name] = before + passed
            if silent[name] >= self._limit_s and passed:
                found.append(name)
                silent[name] = 0.0
        self._heard, self._silent_s = dict(expected), silent
        return found
