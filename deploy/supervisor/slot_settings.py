"""What the worker of a slot is told at its start, whether or not the slot was there at first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from deploy.supervisor.wanted_slots import split
from deploy.workers.actor_settings import ActorSettings


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
        pool, _ = split(slot)
        return self._first[f"{pool}-0"].model_copy(update={"slot": slot})
