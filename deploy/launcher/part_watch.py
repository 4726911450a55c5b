"""Watches the parts of a running cluster. A part that ends is restarted, or ends the cluster.

The supervisor replaces workers; the launcher shows what it reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import NoReturn, Protocol

import redis

from baton.errors import BatonError
from deploy.ray.joined_ray import JoinedRay
from deploy.ray.ray_cluster import RayCluster
from deploy.supervisor.reconciler import HEALTHY_S, Phase, pause_after
from deploy.supervisor.status_store import SlotStatus, StatusStore, SupervisionStatus

SUPERVISOR = "supervisor"
GCS = "gcs"
"""Name of Ray's control store in lists of process ids."""
_POLL_S = 0.5
_LONGEST_PAUSE_S = 4.0
_MAX_DEATHS = 5
_WINDOW_S = 60.0
_FIRST_PAUSE_S = 0.2


class Part(Protocol):
    """A child of the launcher that may be restarted after its death."""

    @property
    def pid(self) -> int: ...

    async def start(self) -> None: ...

    async def wait(self) -> str: ...


class PartWatch:
    """Watches parts of a running cluster. Each method watches one part, until it is cancelled or
    raises."""

    def __init__(self, report: Callable[[str], None], note_pid: Callable[[str, int], None]) -> None:
        """``report`` prints one line of text. ``note_pid`` is called with a part's name and its new
        process id.

        The process id is 0 when the part does not run again.
        """
        self._report = report
        self._note_pid = note_pid

    async def keep(self, name: str, part: Part) -> NoReturn:
        """Restart ``part`` whenever it dies. Raises BatonError when it dies too often within a
        minute."""
        restarts = Restarts()
        how = await part.wait()
        while True:
            pause = restarts.pause(time.monotonic())
            if pause is None:
                raise BatonError(f"{name} keeps ending, last by {how}")
            self._report(f"{name} ended ({how}); restarting it")
            await asyncio.sleep(pause)
            how = await self._run_again(name, part)

    async def keep_forever(self, name: str, part: Part) -> NoReturn:
        """Restart ``part`` whenever it dies, however often that is: something that the part needs
        may be unavailable for a long time."""
        deaths, began = 0, time.monotonic()
        how = await part.wait()
        while True:
            if time.monotonic() - began > HEALTHY_S:
                deaths = 0
            deaths += 1
            if deaths == 1:
                self._report(f"{name} ended ({how}); restarting it until it stays up")
            await asyncio.sleep(min(_LONGEST_PAUSE_S, pause_after(deaths)))
            began = time.monotonic()
            how = await self._run_again(name, part)

    async def _run_again(self, name: str, part: Part) -> str:
        """Start ``part`` and wait for its end. Returns how it ended, or why it did not start."""
        try:
            await part.start()
        except (BatonError, OSError) as error:
            return str(error)
        self._note_pid(name, part.pid)
        return await part.wait()

    async def ray(self, cluster: RayCluster | JoinedRay) -> NoReturn:
        """Watch Ray. Raises BatonError when a daemon dies that cannot be restarted."""
        raise BatonError(f"{await cluster.lost()} has died: the cluster cannot continue")

    async def supervision(self, store: StatusStore, pids: Mapping[str, int]) -> NoReturn:
        """Show what the supervisor reports, and report new process ids to the launcher.

        ``pids`` has the process ids of the workers and the supervisor that are known so far.
        """
        slots = SlotWatch(self._report, self._note_pid, pids)
        while True:
            with contextlib.suppress(redis.RedisError):
                slots.take(await store.read())
            await asyncio.sleep(_POLL_S)


class SlotWatch:
    """Shows what changes from one of the supervisor's reports to the next."""

    def __init__(
        self,
        report: Callable[[str], None],
        note_pid: Callable[[str, int], None],
        pids: Mapping[str, int],
    ) -> None:
        """``report`` prints one line of text. ``note_pid`` is called with a worker's slot and its
        new process id. ``pids`` has the process ids known so far."""
        self._report = report
        self._note_pid = note_pid
        self._pids = dict(pids)
        self._known: dict[str, SlotStatus] = {}

    def take(self, status: SupervisionStatus | None) -> None:
        """Show what has changed since the supervisor's last report. A ``status`` of None changes
        nothing."""
        if status is None:
            return
        if self._is_new(SUPERVISOR, status.pid):
            self._report("the supervisor was restarted")
        for slot, news in status.slots.items():
            known = self._known.get(slot)
            self._known[slot] = news
            if news.state.phase is Phase.RUNNING:
                was_there = slot in self._pids
                if self._is_new(slot, news.pid):
                    self._report(f"{slot} is back" if was_there else f"{slot} has joined")
            elif known is not None and known.state.deaths < news.state.deaths:
                self._report(self._obituary(slot, news))
        for slot in self._known.keys() - status.slots.keys():
            del self._known[slot]
            if self._pids.pop(slot, 0):
                self._note_pid(slot, 0)
                self._report(f"{slot} has left")

    def _is_new(self, name: str, pid: int) -> bool:
        if not pid or self._pids.get(name) == pid:
            return False
        self._pids[name] = pid
        self._note_pid(name, pid)
        return True

    def _obituary(self, slot: str, news: SlotStatus) -> str:
        state = news.state
        if state.phase is Phase.CRASH_LOOP:
            return f"{slot} keeps dying, {state.deaths} times so far: {state.last_error}"
        return f"{slot} died; restarting it ({state.last_error})"


class Restarts:
    """Counts the deaths of a part within the last minute, and decides on restarts. Times are
    monotonic, in seconds."""

    def __init__(self) -> None:
        self._deaths: deque[float] = deque()

    def pause(self, now: float) -> float | None:
        """Record a death of the part at ``now``. Return the seconds to wait before its next start,
        or None after too many deaths."""
        while self._deaths and now - self._deaths[0] > _WINDOW_S:
            self._deaths.popleft()
        self._deaths.append(now)
        if len(self._deaths) > _MAX_DEATHS:
            return None
        return float(_FIRST_PAUSE_S * 2 ** (len(self._deaths) - 1))
