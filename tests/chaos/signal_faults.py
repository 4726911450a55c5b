"""Processes that die, and processes that hang."""

from __future__ import annotations

from signal import SIGCONT, SIGKILL, SIGSTOP

from tests.chaos.fault import Fault


class Killed(Fault):
    """SIGKILL."""

    async def strike(self) -> None:
        self.cluster.signal(self.victim.pid, SIGKILL)


class Stopped(Fault):
    """SIGSTOP, and SIGCONT if it is still there."""

    async def strike(self) -> None:
        self.cluster.signal(self.victim.pid, SIGSTOP)

    async def heal(self) -> None:
        self.cluster.signal(self.victim.pid, SIGCONT)
