"""A host that has no more of something for the cluster, since a stranger has taken it."""

from __future__ import annotations

import asyncio
import sys
from asyncio.subprocess import Process

from tests.chaos.faults.fault import CannotStrike, Fault
from tests.chaos.harness.cluster import ROLES, Cluster
from tests.chaos.harness.victim import Victim

_LEFT_BYTES = 128 << 20
_STRANGER = """
import sys, time
sys.stdin.readline()
held = []
while True:
    held.append(b"x" * (16 << 20))
    time.sleep(0.01)
"""


class HostMemoryFull(Fault):
    """A stranger takes memory until the kernel ends it, or what else it finds.

    The memory is that of the cluster's cgroup, so that the kernel chooses among these processes.
    """

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        self._stranger: Process | None = None

    @property
    def names(self) -> frozenset[str]:
        """Workers may be ended; a router, never."""
        return frozenset(name for name in self.cluster.pids() if name.startswith(ROLES))

    async def prepare(self) -> None:
        """Start the stranger; it waits."""
        group = self.cluster.memory
        if group is None:
            raise CannotStrike("no cgroup of memory can be made")
        self._stranger = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _STRANGER, stdin=asyncio.subprocess.PIPE
        )
        group.add(self._stranger.pid)

    async def drop(self) -> None:
        """End the stranger."""
        if self._stranger is not None and self._stranger.returncode is None:
            self._stranger.kill()
            await self._stranger.wait()

    async def strike(self) -> None:
        """Let it begin."""
        assert self._stranger is not None, "prepared"
        assert self._stranger.stdin is not None, "it is a pipe"
        assert self.cluster.memory is not None, "prepared"
        self.cluster.memory.limit(self.cluster.memory.used_bytes() + _LEFT_BYTES)
        self._stranger.stdin.write(b"\n")

    async def heal(self) -> None:
        """The stranger ends by itself, or now."""
        await self.drop()
        assert self.cluster.memory is not None, "prepared"
        self.cluster.memory.limit(None)
