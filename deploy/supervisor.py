"""Watches the parts of a running cluster: what can be started again is, what cannot ends it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, NoReturn, Protocol

import psutil

from baton.errors import BatonError
from deploy.ray_cluster import RayCluster, RayWorker
from deploy.restarts import Restarts

_POLL_S = 0.5
_RETRY_S = 1.0

log = logging.getLogger(__name__)


class Part(Protocol):
    """A child of the launcher that may be started again after its death."""

    @property
    def pid(self) -> int: ...

    async def start(self) -> None: ...

    async def wait(self) -> str: ...


class Supervisor:
    """Each method watches one part, until it is cancelled or raises."""

    def __init__(self, report: Callable[[str], None], note_pid: Callable[[str, int], None]) -> None:
        """``report`` shows a line; ``note_pid`` learns a part's new process id."""
        self._report = report
        self._note_pid = note_pid

    async def keep(self, name: str, part: Part) -> NoReturn:
        """Start ``part`` again whenever it dies. Raises BatonError when it keeps dying."""
        restarts = Restarts()
        how = await part.wait()
        while True:
            pause = restarts.pause(time.monotonic())
            if pause is None:
                raise BatonError(f"{name} keeps ending, last by {how}")
            self._report(f"{name} ended ({how}); it is started again")
            await asyncio.sleep(pause)
            try:
                await part.start()
            except (BatonError, OSError) as error:
                how = str(error)
            else:
                self._note_pid(name, part.pid)
                how = await part.wait()

    async def ray(self, cluster: RayCluster) -> NoReturn:
        """Raises BatonError when one of Ray's daemons dies."""
        raise BatonError(f"{await cluster.lost()} has died: the cluster cannot go on")

    async def worker(self, worker: RayWorker, pid: int) -> NoReturn:
        """Ray itself starts a dead worker again: say so, and learn the new process id."""
        while True:
            await _gone(pid)
            self._report(f"{worker.slot} died; Ray starts it again")
            pid = (await self._next_life(worker, pid))["pid"]
            self._note_pid(worker.slot, pid)
            self._report(f"{worker.slot} is back")

    async def _next_life(self, worker: RayWorker, old_pid: int) -> dict[str, Any]:
        while True:
            try:
                record = await worker.ready()
            except BatonError as error:
                log.warning("%s", error.message)
            else:
                if record["pid"] != old_pid:
                    return record
            await asyncio.sleep(_RETRY_S)


async def _gone(pid: int) -> None:
    # Ray's child, not ours, so only asking again tells.
    while psutil.pid_exists(pid):  # noqa: ASYNC110
        await asyncio.sleep(_POLL_S)
