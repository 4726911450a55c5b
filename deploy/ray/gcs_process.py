"""Ray's control store (GCS) as a process that is started again after its death.

    running (started by Ray) ─dies→ dead ─start()→ running (a child of the launcher)

Only one with a store behind it may be: the next one reads there what the last one knew.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

import psutil

from deploy.processes.child import Child
from deploy.processes.cluster_mark import ClusterMark
from deploy.processes.run_directory import RunDirectory

_POLL_S = 0.2
_STOP_S = 3.0


class GcsProcess:
    """Implements ``deploy.launcher.part_watch.Part``."""

    def __init__(
        self,
        first: psutil.Process,
        command: Sequence[str],
        mark: ClusterMark,
        run: RunDirectory,
    ) -> None:
        """``first`` is the one that Ray has started; ``command`` starts another on its port."""
        self._first = first
        self._command = tuple(command)
        self._mark = mark
        self._run = run
        self._child: Child | None = None

    @property
    def pid(self) -> int:
        return self._first.pid if self._child is None else self._child.pid

    async def start(self) -> None:
        """Start the next one. Raises OSError."""
        self._child = await Child.spawn("gcs", self._command, self._mark, self._run.log("gcs"))

    async def wait(self) -> str:
        """Wait for its death; says how it ended."""
        if self._child is not None:
            return await self._child.wait()
        # Ray's child, not ours, so only asking again tells.
        while runs(self._first):  # noqa: ASYNC110
            await asyncio.sleep(_POLL_S)
        return "it died"

    def kill(self) -> None:
        """SIGKILL, if it lives."""
        if self._child is not None:
            self._child.kill()
            return
        with contextlib.suppress(psutil.Error):
            self._first.kill()

    async def stop(self) -> None:
        """End what was started here; Ray ends its own."""
        if self._child is not None:
            await self._child.end(_STOP_S)


def runs(process: psutil.Process) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False
