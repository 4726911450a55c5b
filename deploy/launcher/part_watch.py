"""Watches the parts of a running cluster. A part that ends is restarted, however often that is:
workers do not end because something else does. Only a lost Ray ends the launcher.

The supervisor replaces workers; the launcher shows what it reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import NoReturn, Protocol

import redis

from baton.errors import BatonError
from baton.host.oom_killer import OomKills
from deploy.processes.exit_watch import ExitWatch
from deploy.processes.process_identity import ProcessIdentity
from deploy.ray.joined_ray import JoinedRay
from deploy.ray.ray_cluster import RayCluster
from deploy.supervisor.death import Evidence, explain
from deploy.supervisor.reconciler import HEALTHY_S, Phase, pause_after
from deploy.supervisor.status_store import SlotStatus, StatusStore, SupervisionStatus
from deploy.workers.actor_end import ActorEnd, EndKind

SUPERVISOR = "supervisor"
GCS = "gcs"
"""Name of Ray's control store in lists of process ids."""
_POLL_S = 0.5
_LONGEST_PAUSE_S = 4.0
_AGAIN_S = 5.0
_TOLD_DEATHS = 5
"""Number of deaths without a healthy period between them after which the reason is shown again."""

log = logging.getLogger(__name__)


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
        """Restart ``part`` whenever it dies, however often that is: something that the part needs
        may be unavailable for a long time."""
        deaths, began = 0, time.monotonic()
        how = await _end_of(part)
        while True:
            if time.monotonic() - began > HEALTHY_S:
                deaths = 0
            deaths += 1
            if deaths == 1:
                self._report(f"{name} ended ({how}); restarting it until it stays up")
            elif deaths == _TOLD_DEATHS:
                self._report(f"{name} keeps ending, {deaths} times so far, last by {how}")
            await asyncio.sleep(min(_LONGEST_PAUSE_S, pause_after(deaths)))
            began = time.monotonic()
            how = await self._run_again(name, part)

    async def _run_again(self, name: str, part: Part) -> str:
        """Start ``part`` and wait for its end. Returns how it ended, or why it did not start."""
        try:
            await part.start()
        except Exception as error:
            return str(error) or type(error).__name__
        self._note_pid(name, part.pid)
        return await _end_of(part)

    async def again(self, name: str, work: Callable[[], Awaitable[None]]) -> NoReturn:
        """Do ``work`` until cancelled. After an error, which is shown, it is done again: what only
        watches the cluster must not end it."""
        while True:
            try:
                await work()
            except Exception as error:
                log.exception("%s failed", name)
                self._report(f"{name} failed, and is tried again ({type(error).__name__})")
            await asyncio.sleep(_AGAIN_S)

    async def ray(self, cluster: RayCluster | JoinedRay) -> NoReturn:
        """Watch Ray. Raises BatonError when a daemon dies that cannot be restarted."""
        raise BatonError(f"{await cluster.lost()} has died: the cluster cannot continue")

    async def supervision(
        self, store: StatusStore, pids: Mapping[str, int], *, one_machine: bool
    ) -> NoReturn:
        """Show what the supervisor reports, and report new process ids to the launcher.

        ``pids`` has the process ids of the workers and the supervisor that are known so far.
        ``one_machine`` is whether the supervisor always runs on this machine.
        """
        slots = SlotWatch(self._report, self._note_pid, pids, one_machine=one_machine)
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
        *,
        one_machine: bool,
    ) -> None:
        """``report`` prints one line of text. ``note_pid`` is called with a worker's slot and its
        new process id. ``pids`` has the process ids known so far. ``one_machine`` is that of
        ``PartWatch.supervision``."""
        self._report = report
        self._note_pid = note_pid
        self._pids = dict(pids)
        self._known: dict[str, SlotStatus] = {}
        self._one_machine = one_machine
        self._oom_kills = OomKills()
        self._supervisor = self._watched(self._pids.get(SUPERVISOR, 0))

    def take(self, status: SupervisionStatus | None) -> None:
        """Show what has changed since the supervisor's last report. A ``status`` of None changes
        nothing."""
        self._oom_kills.look(time.monotonic())
        if status is None:
            return
        if self._is_new(SUPERVISOR, status.pid):
            self._report(f"the supervisor was restarted{self._supervisors_end()}")
            self._supervisor = self._watched(status.pid)
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

    def _watched(self, pid: int) -> ExitWatch | None:
        if self._one_machine and pid:
            with contextlib.suppress(OSError):
                return ExitWatch(ProcessIdentity.of(pid))
        return None

    def _supervisors_end(self) -> str:
        """Return how the last supervisor has ended, in parentheses; empty if that is unknown."""
        if self._supervisor is None:
            return ""
        code = self._supervisor.look()
        self._supervisor.close()
        if code is None:
            return ""
        killed = code == -signal.SIGKILL and self._oom_kills.take(time.monotonic())
        end = ActorEnd(EndKind.PROCESS, "its log has the reason")
        return f" ({explain(Evidence(end, exit_code=code, oom_killed=killed)).text})"

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


async def _end_of(part: Part) -> str:
    try:
        return await part.wait()
    except Exception as error:
        log.exception("a part ended, and its end could not be handled")
        return type(error).__name__
