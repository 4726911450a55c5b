"""What every fault is: it strikes, lasts, is healed, and is over."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tests.chaos.harness.cluster import Cluster
from tests.chaos.harness.victim import Victim


class CannotStrike(Exception):
    """This machine does not let it; the message says why."""


class Fault(ABC):
    """One fault of one victim: prepared, then dropped, or struck and healed."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        self.cluster = cluster
        self.victim = victim
        self.complaints: list[str] = []
        """What the cluster did not do that it should have done under this fault."""

    @property
    def names(self) -> frozenset[str]:
        """Of the processes that it strikes."""
        return frozenset({self.victim.name})

    async def prepare(self) -> None:  # noqa: B027 - few faults need it
        """What takes time, before the victim is struck. Raises CannotStrike."""

    async def drop(self) -> None:  # noqa: B027 - as above
        """It will not strike."""

    @abstractmethod
    async def strike(self) -> None:
        """Begin."""

    async def heal(self) -> None:  # noqa: B027 - what happens at once needs no healing
        """End it. What the cluster makes good by itself is left to it."""

    async def is_over(self) -> bool:
        """Whether the cluster has made good what no page and no registry tells of.

        It is asked again and again once all is healed. Never raises.
        """
        return True
