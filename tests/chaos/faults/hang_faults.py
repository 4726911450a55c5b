"""Engines that hang while all else of their worker lives: heartbeats go on, and no work is done."""

from __future__ import annotations

import asyncio

import httpx
import psutil

from tests.chaos.faults.fault import CannotStrike, Fault
from tests.chaos.harness.cluster import Cluster
from tests.chaos.harness.thread_stop import ThreadStop, nice_threads
from tests.chaos.harness.victim import Victim
from worker.cores.core_board import NICENESS

_TRIES = 20
_LIVES_S = 0.5
_AGAIN_S = 0.02


class EngineHangs(Fault):
    """The threads that compute are stopped, one by one, and no other."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        self._stop: ThreadStop | None = None

    async def prepare(self) -> None:
        try:
            threads = nice_threads(self.victim.pid, NICENESS)
        except OSError as error:
            raise CannotStrike(f"the threads cannot be listed: {error}") from error
        if not threads:
            raise CannotStrike("no thread has the nice value of those that compute")
        stop = ThreadStop(threads)
        try:
            await stop.stop()
        except OSError as error:
            raise CannotStrike(f"a thread cannot be stopped: {error}") from error
        stop.go_on()
        self._stop = stop

    async def strike(self) -> None:
        assert self._stop is not None, "not prepared"
        for _ in range(_TRIES):
            await self._stop.stop()
            if await self._lives():
                return
            # It had the interpreter's lock, so no heartbeat was sent: that is another fault.
            self._stop.go_on()
            await asyncio.sleep(_AGAIN_S)
        self.complaints.append("its engine never stood still alone")

    async def heal(self) -> None:
        assert self._stop is not None, "not prepared"
        self._stop.go_on()

    async def _lives(self) -> bool:
        """Whether the rest of the process runs."""
        assert self.victim.worker is not None, "a worker's engine hangs"
        try:
            async with asyncio.timeout(_LIVES_S):
                await self.cluster.page(self.victim.worker.record.metrics_address)
        except (httpx.HTTPError, TimeoutError, psutil.Error):
            return False
        return True
