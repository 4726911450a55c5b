"""Who has asked for room, has lost it before, and comes before those that are new.

A claim lasts while whoever made it asks again and again. Plain Python, ``now`` in seconds of any
one clock; owned by the control loop.
"""

from __future__ import annotations

from kvtransfer.tickets.ticket import Attempt

CLAIM_S = 0.5
"""A claim that is not renewed for so long has lapsed: whoever made it has gone elsewhere."""


class Claims:
    """In the order in which they were made."""

    def __init__(self) -> None:
        self._until: dict[Attempt, float] = {}

    def may_go(self, attempt: Attempt, now: float) -> bool:
        """Whether nobody comes before it."""
        self._until = {one: until for one, until in self._until.items() if until > now}
        first = next(iter(self._until), attempt)
        return first == attempt

    def make(self, attempt: Attempt, now: float) -> None:
        """It has found no room; one that had a claim keeps its place."""
        self._until[attempt] = now + CLAIM_S

    def drop(self, attempt: Attempt) -> None:
        """It has got its room."""
        self._until.pop(attempt, None)
