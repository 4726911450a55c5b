"""A host that has no more of something for the cluster, since a stranger has taken it."""

from __future__ import annotations

import asyncio
import signal
import sys
import time
from asyncio.subprocess import Process

from tests.chaos.faults.fault import CannotStrike, Fault
from tests.chaos.harness.cluster import ROLES, Cluster
from tests.chaos.harness.victim import Victim

_LEFT_BYTES = 128 << 20
_BACK_S = 60.0
_LOOK_S = 0.2
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


class FoldersFull(Fault):
    """The disk of the run directory and of ``data_dir`` has no byte left, and a worker dies. It
    comes back while the disk is full."""

    async def prepare(self) -> None:
        """See ``Fault.prepare``."""
        if self.cluster.disk is None:
            raise CannotStrike("no small disk can be mounted")

    async def strike(self) -> None:
        """Fill the disk, and kill the worker."""
        assert self.cluster.disk is not None, "prepared"
        await asyncio.to_thread(self.cluster.disk.fill)
        self.cluster.signal(self.victim.pid, signal.SIGKILL)

    async def heal(self) -> None:
        """Wait for the next worker, then give the space back."""
        assert self.cluster.disk is not None, "prepared"
        until = time.monotonic() + _BACK_S
        try:
            while not await self._is_back():
                if time.monotonic() > until:
                    self.complaints.append(
                        f"{self.victim.name} did not come back within {_BACK_S:.0f} s while the "
                        "disk was full"
                    )
                    return
                await asyncio.sleep(_LOOK_S)
        finally:
            await asyncio.to_thread(self.cluster.disk.free)

    async def _is_back(self) -> bool:
        return any(
            worker.slot == self.victim.name and worker.pid != self.victim.pid
            for worker in await self.cluster.workers()
        )
