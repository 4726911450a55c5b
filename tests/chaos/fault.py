"""What every fault is: it strikes, lasts, and is healed."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tests.chaos.cluster import Cluster
from tests.chaos.victim import Victim


class CannotStrike(Exception):
    """This machine does not let it; the message says why."""


class Fault(ABC):
    """One fault of one victim: prepared, then dropped, or struck and healed."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        self.cluster = cluster
        self.victim = victim

    async def prepare(self) -> None:  # noqa: B027 - few faults need it
        """What takes time, before the victim is struck. Raises CannotStrike."""

    async def drop(self) -> None:  # noqa: B027 - as above
        """It will not strike."""

    @abstractmethod
    async def strike(self) -> None:
        """Begin."""

    async def heal(self) -> None:  # noqa: B027 - what happens at once needs no healing
        """End it. What the cluster makes good by itself is left to it."""
