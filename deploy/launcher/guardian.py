"""The guardian: a process that ends all others of a cluster when the launcher is gone.

It holds the reading end of a pipe whose writing end only the launcher has (``Guardian``). When the
launcher ends for any reason, even by SIGKILL, the system closes that end, and the guardian sweeps
(``main``). It runs in a separate session, so that neither Ctrl-C nor a closed terminal ends it.

    watching ─released by the launcher→ ended
    watching ─pipe closed→ sweeping → ended
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path

import psutil

from deploy.processes.child import Child
from deploy.processes.run_directory import ClusterMark, RunDirectory

RELEASE = b"released\n"
"""Sent by the launcher to the guardian after the launcher has ended all other processes itself."""
GRACE_S = 2.0
_DEADLINE_S = 30.0
_POLL_S = 0.05
_QUIET_LOOKS = 3
_RELEASE_S = 5.0


def sweep(
    mark: ClusterMark, spare: Collection[int] = (), *, grace_s: float = GRACE_S
) -> list[psutil.Process]:
    """End every process that carries ``mark``, except those with a pid in ``spare``.

    It sends SIGTERM, then SIGKILL after ``grace_s`` seconds. It continues until several checks in a
    row find no process, since a live raylet starts new workers. Returns the processes that could
    not be ended within 30 seconds, usually none.
    """
    asked: set[psutil.Process] = set()
    start = time.monotonic()
    quiet = 0
    while True:
        left = [process for process in mark.processes() if process.pid not in spare]
        quiet = 0 if left else quiet + 1
        waited = time.monotonic() - start
        if quiet == _QUIET_LOOKS or waited > _DEADLINE_S:
            return left
        for process in left:
            with contextlib.suppress(psutil.Error):
                if waited >= grace_s:
                    process.kill()
                elif process not in asked:
                    asked.add(process)
                    process.terminate()
        time.sleep(_POLL_S)


def main(arguments: list[str] | None = None) -> int:
    """Watch standard input, which is the launcher's pipe. When the pipe closes and the launcher has
    not sent ``RELEASE``, end the cluster's processes. Returns the exit code."""
    parser = argparse.ArgumentParser(prog="deploy.launcher.guardian")
    parser.add_argument("cluster_id")
    parser.add_argument("run_directory", type=Path)
    given = parser.parse_args(arguments)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    if _last_words() == RELEASE:
        return 0
    left = sweep(ClusterMark(given.cluster_id, given.run_directory), {os.getpid()})
    RunDirectory(given.run_directory).keep_logs()
    return 1 if left else 0


def _last_words() -> bytes:
    """Return everything that the launcher wrote until its end of the pipe was closed."""
    words = b""
    while piece := os.read(sys.stdin.fileno(), 64):
        words += piece
    return words


if __name__ == "__main__":
    sys.exit(main())


class Guardian:
    """The launcher's handle of the guardian process.

    While the guardian runs, no process of the cluster outlives the launcher.
    """

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
        """Start the guardian process. If the last one died, this starts another one. Raises
        OSError."""
        arguments = [sys.executable, "-P", "-m", "deploy.launcher.guardian"]
        arguments += [self._mark.cluster_id, str(self._mark.run_directory)]
        self._child = await Child.spawn(
            "guardian", arguments, self._mark, self._run.log("guardian")
        )

    async def wait(self) -> str:
        """Wait for an unexpected end of the guardian process. Returns how it ended."""
        assert self._child is not None
        return await self._child.wait()

    async def release(self) -> None:
        """End the guardian without a sweep, after the launcher has ended all other processes in
        order."""
        if self._child is None:
            return
        await self._child.say(RELEASE)
        try:
            async with asyncio.timeout(_RELEASE_S):
                await self._child.wait()
        except TimeoutError:
            await self._child.end(0)
