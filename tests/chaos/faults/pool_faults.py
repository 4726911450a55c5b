"""All workers of a role die at once: there is no spare."""

from __future__ import annotations

import asyncio
import time
from signal import SIGKILL

import httpx

from tests.chaos.faults.fault import Fault
from tests.chaos.harness.cluster import Cluster, is_alive
from tests.chaos.harness.victim import Victim

_DEAD_S = 60.0
_LOOK_S = 0.01
_SEEN_S = 60.0
"""A router knows of a dead worker long before that; to start another one takes about as long."""


class PoolGone(Fault):
    """SIGKILL for each of the victim's role."""

    expected: str
    """What /health says meanwhile."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        self._pids: dict[str, int] = {}
        self._seen: asyncio.Task[bool] | None = None

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._pids) | {self.victim.name}

    async def prepare(self) -> None:
        assert self.victim.worker is not None, "a worker's pool goes"
        role = self.victim.worker.role
        self._pids = {
            worker.slot: worker.pid
            for worker in await self.cluster.workers()
            if worker.role == role
        }

    async def strike(self) -> None:
        for pid in self._pids.values():
            self.cluster.signal(pid, SIGKILL)
        self._seen = asyncio.create_task(self._is_seen())

    async def heal(self) -> None:
        """Wait until they are gone; they are started again by others."""
        async with asyncio.timeout(_DEAD_S):
            while any(map(is_alive, self._pids.values())):
                await asyncio.sleep(_LOOK_S)
        assert self._seen is not None, "not struck"
        if not await self._seen:
            self.complaints.append(f"no router has said {self.expected!r} while the pool was gone")

    async def _is_seen(self) -> bool:
        """Whether some router has said what is expected."""
        until = time.monotonic() + _SEEN_S
        while time.monotonic() < until:
            try:
                if await self.cluster.health() == self.expected:
                    return True
            except httpx.HTTPError:
                pass
            await asyncio.sleep(_LOOK_S)
        return False


class PrefillGone(PoolGone):
    """Decode workers compute the prompts until it is back: no client sees an error."""

    expected = "degraded"


class DecodeGone(PoolGone):
    """No request can be served: each one fails at once."""

    expected = "down"
