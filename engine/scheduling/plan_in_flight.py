"""A plan that the engine has, and how much of its result the scheduler has. Plain Python."""

from __future__ import annotations

from collections.abc import Container

from engine.scheduling.plan import PlanRow
from engine.scheduling.sequence import Sequence


class PlanInFlight:
    """A plan of one scheduler.

    Its sequences land one after another. Each is counted once, even where taking in the result of
    one of them fails: ``Scheduler.fail`` goes on behind that one.
    """

    __slots__ = ("_landed", "copied", "rows", "stayed")

    def __init__(self, rows: list[tuple[Sequence, PlanRow]], copied: list[int]) -> None:
        self.rows = rows
        self.copied = copied
        """Blocks that it copies from, which are pinned until its end."""
        self.stayed: list[Sequence] = []
        """Sequences that had not left when they landed, and the siblings that they began."""
        self._landed = 0

    def land(self, left: Container[Sequence]) -> int | None:
        """Land the next sequence and return its place; None: all have landed.

        ``left`` has the sequences that have left the scheduler.
        """
        place = self._landed
        if place == len(self.rows):
            return None
        sequence, row = self.rows[place]
        self._landed += 1
        sequence.in_flight -= 1
        sequence.pending -= row.sample
        if sequence not in left:
            self.stayed.append(sequence)
        return place
