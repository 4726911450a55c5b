"""What the worker of a slot is told at its start, whether or not the slot was there at first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from deploy.actor_settings import ActorSettings
from deploy.wanted_slots import split

CORE_LINES = 8
"""So many workers may be added on a host and share its cores step by step with those before."""


class SlotSettings:
    """Pure."""

    def __init__(self, first: Sequence[ActorSettings]) -> None:
        """``first``: of the slots that the cluster came up with, at least one of each pool."""
        self._first = {settings.slot: settings for settings in first}
        self.pools = Counter(settings.pool for settings in first)
        """How many of each pool."""

    def of(self, slot: str) -> ActorSettings:
        """Raises KeyError for one of an unknown pool."""
        known = self._first.get(slot)
        return self._further(slot) if known is None else known

    def _further(self, slot: str) -> ActorSettings:
        pool, place = split(slot)
        like = self._first[f"{pool}-0"]
        number = self._number(pool, place)
        return like.model_copy(
            update={
                "slot": slot,
                "number": number,
                # Whoever comes without a line on the board takes a fixed share of the cores.
                "core_board": like.core_board if number < like.core_lines else "",
                "log_file": str(Path(like.log_file).with_name(f"{slot}.log")),
            }
        )

    def _number(self, pool: str, place: int) -> int:
        """Another one than any other slot's, whoever asks: pools take those that follow in turn."""
        turn = list(self.pools).index(pool)
        return len(self._first) + (place - self.pools[pool]) * len(self.pools) + turn
