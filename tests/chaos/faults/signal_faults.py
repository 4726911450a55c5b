"""Processes that die, and processes that hang."""

from __future__ import annotations

import asyncio
from signal import SIGCONT, SIGKILL, SIGSTOP

from tests.chaos.faults.fault import Fault
from tests.chaos.harness.cluster import is_alive

_DEAD_S = 60.0
_LOOK_S = 0.01


class Killed(Fault):
    """SIGKILL."""

    async def strike(self) -> None:
        self.cluster.signal(self.victim.pid, SIGKILL)

    async def heal(self) -> None:
        """Wait until it is gone; it is started again by others."""
        # A process of many pages takes a while to die, and looks alive till then.
        async with asyncio.timeout(_DEAD_S):
            while is_alive(self.victim.pid):
                await asyncio.sleep(_LOOK_S)


class Stopped(Fault):
    """SIGSTOP, and SIGCONT if it is still there."""

    async def strike(self) -> None:
        self.cluster.signal(self.victim.pid, SIGSTOP)

    async def heal(self) -> None:
        self.cluster.signal(self.victim.pid, SIGCONT)


class HostStopped(Fault):
    """SIGSTOP for all that the machine runs of the cluster, its store too, and SIGCONT."""

    async def strike(self) -> None:
        self.cluster.stand_still()

    async def heal(self) -> None:
        self.cluster.go_on()
