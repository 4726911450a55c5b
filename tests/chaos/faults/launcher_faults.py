"""Launchers are away, and the supervisor with them: nothing heals, and requests do not notice.

The supervisor is stopped (SIGSTOP), since Ray would restart one that died. It is continued when
another one leads, and must disturb nothing then.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from signal import SIGKILL

import psutil
import redis

from tests.chaos.faults.fault import CannotStrike, Fault
from tests.chaos.harness.cluster import Cluster
from tests.chaos.harness.led_cluster import LAUNCHERS, LedCluster
from tests.chaos.harness.victim import Victim
from tests.support.e2e.cluster import UpProcess

_LOOK_S = 0.1
_STORE_AWAY_S = 3.0


class LaunchersAway(Fault):
    """Some are killed (SIGKILL), and others started in the end."""

    def __init__(self, cluster: Cluster, victim: Victim) -> None:
        super().__init__(cluster, victim)
        self.takeover_s = 0.0
        """See ``RoundReport``."""
        self._epoch = 0
        """Of the supervisor before the fault."""
        self._since = 0.0
        self._taken_over: asyncio.Task[None] | None = None
        self._stopped: list[psutil.Process] = []
        self._is_checked = False

    @property
    def led(self) -> LedCluster:
        assert isinstance(self.cluster, LedCluster), "prepared"
        return self.cluster

    def _victims(self) -> list[UpProcess]:
        """Both."""
        return [*self.led.launchers]

    async def prepare(self) -> None:
        if not isinstance(self.cluster, LedCluster):
            raise CannotStrike("the cluster has one launcher, and ends with it")
        self._epoch = await self.led.epoch()

    async def strike(self) -> None:
        victims = self._victims()
        for process in self.led.supervisors():
            process.suspend()
            self._stopped.append(process)
        for launcher in victims:
            await self._go(launcher)
        self._since = time.monotonic()
        self._taken_over = asyncio.create_task(self._until_taken_over())

    async def _go(self, launcher: UpProcess) -> None:
        await asyncio.to_thread(self.led.kill, launcher)

    async def heal(self) -> None:
        assert self._taken_over is not None, "not struck"
        if self.led.launchers and not self._taken_over.done():
            self.complaints.append("the launcher that waited has not taken over")
        if not self.led.launchers:
            self._since = time.monotonic()
            if self._taken_over.done():
                self.complaints.append("a supervisor's term began without a launcher")
        self._come_back()

    def _come_back(self) -> None:
        while len(self.led.launchers) < LAUNCHERS:
            self.led.launch()

    async def is_over(self) -> bool:
        """Whether another supervisor leads; workers must refuse the orders of the one before."""
        assert self._taken_over is not None, "not struck"
        if not (self._taken_over.done() and self.led.is_led):
            return False
        if not self._is_checked:
            self._is_checked = True
            for process in self._stopped:
                # Another launcher may have ended it.
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.resume()
            await self._check_orders()
        return True

    async def _until_taken_over(self) -> None:
        while await self._epoch_now() <= self._epoch:
            await asyncio.sleep(_LOOK_S)
        self.takeover_s = time.monotonic() - self._since

    async def _epoch_now(self) -> int:
        try:
            return await self.led.epoch()
        except (redis.RedisError, OSError):
            return 0  # the store is away, too

    async def _check_orders(self) -> None:
        try:
            found = await self.led.give_stale_orders(self._epoch)
        except AssertionError as error:
            self.complaints.append(f"orders cannot be given: {error}")
            return
        if found.lowest <= self._epoch:
            self.complaints.append(f"a worker has seen no epoch above {found.lowest}")
        self.complaints += [f"an order of epoch {self._epoch}: {line}" for line in found.obeyed]
        expected = {*self.cluster.pids()} - {"router-0"} | {"supervisor"}
        if missing := expected - {*found.refused} - {line.split(":")[0] for line in found.obeyed}:
            self.complaints.append(f"{', '.join(sorted(missing))}: not known to Ray")


class LauncherAway(LaunchersAway):
    """The one that leads is killed. The other takes over; the one that is started later waits."""

    def _victims(self) -> list[UpProcess]:
        return [self.led.up]


class LauncherStopped(LauncherAway):
    """The one that leads stands still (SIGSTOP). Continued, it finds that the other one leads."""

    _launcher: UpProcess | None = None

    async def _go(self, launcher: UpProcess) -> None:
        self._launcher = launcher
        self.led.stop(launcher)

    def _come_back(self) -> None:
        assert self._launcher is not None, "not struck"
        self.led.resume(self._launcher)


class BothAwayOneWorkerDead(LaunchersAway):
    """Meanwhile a worker dies, and stays away until a launcher is there."""

    async def strike(self) -> None:
        await super().strike()
        self.cluster.signal(self.victim.pid, SIGKILL)

    async def heal(self) -> None:
        if self.victim.name in {worker.slot for worker in await self.cluster.workers()}:
            self.complaints.append(f"{self.victim.name} was replaced without a supervisor")
        await super().heal()


class BothAwayStoreEmptied(LaunchersAway):
    """Meanwhile the store dies, and is back a few seconds later, empty."""

    _back: asyncio.Task[None] | None = None

    async def strike(self) -> None:
        await super().strike()
        await self.cluster.store.kill()
        self._back = asyncio.create_task(self._bring_back())

    async def heal(self) -> None:
        assert self._back is not None, "not struck"
        await self._back
        await super().heal()

    async def _bring_back(self) -> None:
        await asyncio.sleep(_STORE_AWAY_S)
        await self._restore()

    async def _restore(self) -> None:
        """Leases and epochs are lost."""
        await self.cluster.store.start()


class BothAwayStoreFailedOver(BothAwayStoreEmptied):
    """Meanwhile the store dies, and its replica takes its place a few seconds later."""

    async def prepare(self) -> None:
        await super().prepare()
        await self.cluster.store.add_replica()

    async def drop(self) -> None:
        await self.cluster.store.remove_replica()

    async def _restore(self) -> None:
        await self.cluster.fail_over()
