"""The launcher's hold on the guardian process (``deploy.launcher.reaper``)."""

from __future__ import annotations

import asyncio
import sys

from deploy.launcher.reaper import RELEASE
from deploy.processes.child import Child
from deploy.processes.cluster_mark import ClusterMark
from deploy.processes.run_directory import RunDirectory

_RELEASE_S = 5.0


class Guardian:
    """While it runs, no process of the cluster outlives the launcher."""

    def __init__(self, mark: ClusterMark, run: RunDirectory) -> None:
        self._mark = mark
        self._run = run
        self._child: Child | None = None

    @property
    def started(self) -> bool:
        return self._child is not None

    @property
    def pid(self) -> int:
        assert self._child is not None
        return self._child.pid

    async def start(self) -> None:
        """Start it, or the next one after one has died. Raises OSError."""
        arguments = [sys.executable, "-P", "-m", "deploy.launcher.reaper"]
        arguments += [self._mark.cluster_id, str(self._mark.run_directory)]
        self._child = await Child.spawn("reaper", arguments, self._mark, self._run.log("reaper"))

    async def wait(self) -> str:
        """Wait for its end, which only somebody else can have brought about."""
        assert self._child is not None
        return await self._child.wait()

    async def release(self) -> None:
        """Let it go without a sweep: everything has been ended in order."""
        if self._child is None:
            return
        await self._child.say(RELEASE)
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self._child.wait()
        except TimeoutError:
            await self._child.end(0)
