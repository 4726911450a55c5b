"""When Ray is to start a process that stands by, of a node where workers live. Pure.

nobody stands by ─at two looks in a row→ one is asked for ─it stands by→ all is well
asked for ─PATIENCE_S later still nobody→ asked for again ─MAX_ASKS in a row→ given up
"""

from __future__ import annotations

LOOK_S = 5.0
"""Whoever has just died is replaced first: to import beside him would make him late."""
PATIENCE_S = 60.0
MAX_ASKS = 3


class StandbyWatch:
    """Owned by the thread that looks."""

    def __init__(self) -> None:
        self._missing = 0
        self._asks = 0
        self._asked_at = float("-inf")

    def look(self, now: float, *, stands_by: bool) -> bool:
        """Whether to ask for one; ``now`` is monotonic, in seconds."""
        if stands_by:
            self._missing, self._asks = 0, 0
            self._asked_at = float("-inf")
            return False
        self._missing += 1
        if self._missing < 2 or self.gave_up or now - self._asked_at < PATIENCE_S:
            return False
        self._asks += 1
        self._asked_at = now
        return True

    @property
    def gave_up(self) -> bool:
        """Whether none has come, however often one was asked for."""
        return self._asks >= MAX_ASKS
