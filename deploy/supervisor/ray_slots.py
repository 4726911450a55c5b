"""What of the workers can be seen through Ray, and what can be done about them.

This process may be deaf: Ray's control store knows of a death, and what it tells of that does not
come, for minutes, after it was itself started again. Then a new process is needed, which hears.

Calls to living workers go from process to process, so that they need no control store (GCS); to
find one, to place one and to end one takes it. Those calls block while it is away: they are made on
a thread of their own, and answers are awaited elsewhere. Owned by the supervisor's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import TypeAdapter

from baton.errors import BatonError, WorkerFailed
from baton.liveness.silence import SilenceWatch
from deploy.processes.child import last_lines
from deploy.processes.daemon_thread import DaemonThread
from deploy.processes.process_identity import Whereabouts
from deploy.supervisor.reconciler import Observed
from deploy.workers.actor_process import end_other, reason
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.node import run_directory_here
from deploy.workers.ranks import give_places_back
from deploy.workers.ray_worker import RayWorker, end_at, find, find_all, is_known, place
from deploy.workers.worker_actor import PingReply, WorkerActor

ANSWER_S = 3.0
"""A worker that has not answered a ping for so long is silent."""
_DEAF_S = 6.0
"""So much longer than ``ANSWER_S`` a silent worker's death may take to be told, and half of it once
the control store is known to know."""
_LONGEST_GAP_S = 5.0
"""Between two looks at the registry no more is counted as time without an entry: the supervisor may
have stood still itself."""

_STALE_S = 5.0
"""An entry that was not renewed for this long, or for its TTL where that is longer, lists no
worker: it is only kept because the clock of Redis was set back."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotObservation:
    """What is seen of a slot."""

    observed: Observed
    error: str = ""
    """Why nobody is there."""
    pid: int = 0
    node: str = ""
    """Ray's id of the node where it is."""


_ABSENT = SlotObservation(Observed.ABSENT)
_WHEREABOUTS = TypeAdapter(Whereabouts)


class RaySlots:
    """The workers' slots of one cluster."""

    def __init__(
        self,
        settings: Callable[[str], ActorSettings],
        roll: Callable[[], Awaitable[Mapping[str, Hashable] | None]],
        registry_ttl_s: float,
        actor_class: type = WorkerActor,
    ) -> None:
        """``settings`` returns those of a slot.

        ``roll`` returns the slots whose workers the registry lists, each with a value that every
        renewal of its entries changes; None where the registry cannot be asked. ``registry_ttl_s``
        is the TTL of these entries in seconds.
        """
        self._settings = settings
        self._roll = roll
        self._listed: Collection[str] | None = None
        self._renewals = SilenceWatch[str](max(_STALE_S, registry_ttl_s))
        self._refreshed_at = time.monotonic()
        self._actor_class = actor_class
        self._thread = DaemonThread("fleet")
        self._far_ends = DaemonThread("far ends")
        self._lives: dict[str, _Life] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._death = asyncio.Event()

    async def recall(self) -> None:
        """Find the workers that live, whoever has started them. Raises what Ray raises."""
        for worker in await self._thread.call(find_all):
            if worker.slot not in self._lives:
                self._lives[worker.slot] = _Life(worker, self._death.set)

    @property
    def slots(self) -> Collection[str]:
        """Where somebody is."""
        return self._lives.keys()

    async def death(self) -> None:
        """Wait until one is heard of that nobody has looked at yet."""
        await self._death.wait()

    async def refresh(self) -> None:
        """See whom the registry lists. A look at every slot follows."""
        self._death.clear()
        entries = await self._roll()
        now = time.monotonic()
        passed = min(now - self._refreshed_at, _LONGEST_GAP_S)
        self._refreshed_at = now
        if entries is None:
            self._listed = None
        else:
            self._renewals.tick(entries, now)
            self._listed = {slot for slot in entries if not self._renewals.is_silent(slot)}
        for slot, life in self._lives.items():
            # Where nobody is listed, the registry is to blame.
            lost = self._listed is not None and slot not in self._listed and len(self._listed) > 0
            life.unlisted_s = life.unlisted_s + passed if lost else 0.0

    async def look(self, slot: str) -> SlotObservation:
        """What is there now; does not wait for an answer.

        Raises BatonError when this process hears nothing of Ray any more.
        """
        life = self._lives.get(slot)
        if life is None:
            return _ABSENT
        now = time.monotonic()
        seen = life.look(now)
        if seen.observed in (Observed.SILENT, Observed.STARTING):
            self._doubt(slot, life, now)
        if seen.observed is Observed.ABSENT:
            self._lives.pop(slot).close()
            if life.failed_to_start:
                # It stays until it is ended, so that it could say why.
                self._in_background(self._kill(life))
            else:
                self._in_background(self._clear(life))
            return SlotObservation(Observed.ABSENT, seen.error + self._last_words(slot, life))
        if seen.observed is Observed.SILENT and (self._listed is None or slot in self._listed):
            # Silence in Redis condemns nobody.
            return SlotObservation(Observed.SERVING, pid=seen.pid, node=seen.node)
        return seen

    def _doubt(self, slot: str, life: _Life, now: float) -> None:
        """Whether it is the worker that is silent, or Ray."""
        if life.dead_since is not None and now - life.dead_since > _DEAF_S / 2:
            raise BatonError(f"Ray knows that {slot} is dead, and does not tell")
        if not life.doubted and life.silent_s(now) > ANSWER_S + _DEAF_S:
            life.doubted = True
            self._in_background(self._ask_ray(slot, life))

    async def _ask_ray(self, slot: str, life: _Life) -> None:
        try:
            known = await self._thread.call(lambda: is_known(slot))
        except Exception as error:
            log.warning("%s: Ray does not say whether it lives: %s", slot, error)
            known = True
        life.dead_since = None if known else time.monotonic()
        life.doubted = not known

    async def start(self, slot: str) -> None:
        """Have Ray place a worker. Raises what Ray raises."""
        settings = self._settings(slot)

        def start() -> RayWorker:
            try:
                return place(settings, self._actor_class)
            except ValueError:
                # An earlier call was thought to be lost, and was not.
                found = find(slot)
                if found is None:
                    raise
                return found

        self._lives[slot] = _Life(await self._thread.call(start), self._death.set)

    async def drain(self, slot: str, deadline_s: float) -> None:
        """Have a worker take nothing more, and end by itself. Raises what Ray raises."""
        life = self._lives.get(slot)
        if life is not None:
            async with asyncio.timeout(ANSWER_S):
                await life.worker.drain(deadline_s)

    async def end(self, slot: str) -> None:
        """End a worker's process, frozen or not; idempotent. Raises what Ray raises."""
        life = self._lives.get(slot)
        if life is not None:
            await self._kill(life)

    async def _kill(self, life: _Life) -> None:
        # Ray calls a worker dead that it could not end, because it was stopped (SIGSTOP).
        if life.whereabouts is not None:
            self._end_process(life.worker.slot, life.whereabouts)
        await self._clear(life, life.worker.kill)

    async def _clear(self, life: _Life, first: Callable[[], None] = lambda: None) -> None:
        """Do ``first``, and end the other ranks of a worker that has ended, with their places.

        A rank that was stopped (SIGSTOP) does not end by itself. Raises what Ray raises.
        """
        slot = life.worker.slot
        for rank in life.other_ranks:
            self._end_process(slot, rank)
        has_places = self._settings(slot).own_pool().ranks > 1

        # In one call: the next life's places come after it.
        def clear() -> None:
            first()
            if has_places:
                give_places_back(slot)

        await self._thread.call(clear)

    def _end_process(self, slot: str, whereabouts: Whereabouts) -> None:
        if whereabouts.process.is_near:
            end_other(whereabouts.process)
        else:
            self._in_background(self._end_far(slot, whereabouts))

    async def _end_far(self, slot: str, whereabouts: Whereabouts) -> None:
        try:
            await end_at(whereabouts, self._far_ends)
        except Exception as error:
            # Its node may be gone, and it with it.
            log.info("%s was not ended on its node: %s", slot, reason(error))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _last_words(self, slot: str, life: _Life) -> str:
        """What a worker's log ends with, where it is on this node: an error, or a traceback."""
        settings = self._settings(slot)
        is_near = life.whereabouts is not None and life.whereabouts.process.is_near
        if not (is_near or settings.is_on_one_machine):
            return ""
        line = last_lines(run_directory_here(settings.cluster_id).log(slot), 1)
        # A line of the log begins with a date.
        if line and line[0].isdigit():
            line = line.partition(" ERROR ")[2].partition(": ")[2]
        return f" ({line.strip()})" if line else ""

    def close(self) -> None:
        """Look no more. The workers go on."""
        for life in self._lives.values():
            life.close()


class _Life:
    """One life of a worker, seen by what it answers."""

    def __init__(self, worker: RayWorker, tell_death: Callable[[], None]) -> None:
        self.worker = worker
        self._tell_death = tell_death
        self.whereabouts: Whereabouts | None = None
        """Once it serves."""
        self.other_ranks: list[Whereabouts] = []
        """Of a worker of several."""
        self.failed_to_start = False
        self.unlisted_s = 0.0
        """For how long the registry has not listed it, though it lists others."""
        self.doubted = False
        """Whether Ray is being asked if it lives."""
        self.dead_since: float | None = None
        """Since when Ray's control store is known to know that it does not."""
        self._serves = False
        self._leaves = False
        self._asked_at = time.monotonic()
        self._heard_at = self._asked_at
        self._asking = asyncio.create_task(self._ask())

    def look(self, now: float) -> SlotObservation:
        """What the last question has brought; asks the next one."""
        if not self._asking.done():
            return self._seen(silent=self._serves and now - self._asked_at > ANSWER_S)
        error = self._asking.exception()
        if error is None:
            self._heard(self._asking.result(), now)
        elif isinstance(error, WorkerFailed):
            self.failed_to_start = True
            return SlotObservation(Observed.ABSENT, error.message)
        elif _is_death(error):
            return SlotObservation(Observed.ABSENT, reason(error))  # type: ignore[arg-type]
        self._asked_at = now
        self._asking = asyncio.create_task(self._ask())
        return self._seen(silent=self._serves and now - self._heard_at > ANSWER_S)

    def silent_s(self, now: float) -> float:
        """Seconds since its last answer."""
        return now - self._heard_at

    async def _ask(self) -> dict[str, Any] | PingReply:
        try:
            if not self._serves:
                return await self.worker.ready()
            return await self.worker.ping(self.unlisted_s)
        except Exception as error:
            if isinstance(error, WorkerFailed) or _is_death(error):
                self._tell_death()
            raise

    def _heard(self, answer: dict[str, Any] | PingReply, now: float) -> None:
        self._heard_at = now
        if isinstance(answer, PingReply):
            self._leaves = answer is PingReply.LEAVING
            return
        self._serves, self.unlisted_s = True, 0.0
        self.whereabouts = _WHEREABOUTS.validate_python(answer)
        self.other_ranks = [_WHEREABOUTS.validate_python(rank) for rank in answer["other_ranks"]]

    def _seen(self, *, silent: bool) -> SlotObservation:
        if not self._serves:
            return SlotObservation(Observed.STARTING)
        observed = Observed.LEAVING if self._leaves else Observed.SERVING
        assert self.whereabouts is not None, "it serves"
        pid, node = self.whereabouts.process.pid, self.whereabouts.node
        return SlotObservation(Observed.SILENT if silent else observed, pid=pid, node=node)

    def close(self) -> None:
        self._asking.cancel()


def _is_death(error: BaseException) -> bool:
    from ray.exceptions import ActorDiedError  # noqa: PLC0415

    return isinstance(error, ActorDiedError)
