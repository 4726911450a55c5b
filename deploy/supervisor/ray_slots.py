"""The workers' slots as Ray reports them: the worker in each slot, and actions on it.

After a restart of Ray's control store (GCS), its notifications of deaths may not reach this process
for minutes. Then the supervisor must exit: its next process receives them.

Calls to running workers go from process to process, without the control store. Finding, placing and
ending a worker need it, and block while it is unreachable. They run on a separate thread, and
answers are awaited elsewhere. Owned by the supervisor's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from baton.errors import BatonError, WorkerFailed
from baton.liveness.silence import SilenceWatch
from deploy.processes.daemon_thread import DaemonThread
from deploy.processes.exit_watch import ExitWatch
from deploy.processes.leadership import SupervisorTerm
from deploy.processes.process_identity import Whereabouts
from deploy.ray_internals import death_of
from deploy.supervisor.death import Death, DeathCause, explain
from deploy.supervisor.death_evidence import DeathEvidence
from deploy.supervisor.reconciler import Observed
from deploy.workers.actor_end import ActorEnd, EndKind
from deploy.workers.actor_process import actor_end, end_other, is_death, reason
from deploy.workers.actor_settings import ActorSettings
from deploy.workers.ranks import remove_places
from deploy.workers.ray_worker import RayWorker, end_at, find, find_all, is_known, place
from deploy.workers.worker_actor import PingReply, WorkerActor

ANSWER_S = 3.0
"""Time after which a worker that does not answer a ping counts as silent, in seconds."""
_DEAF_S = 6.0
"""Time, in addition to ``ANSWER_S``, within which Ray must report the death of a silent worker to
this process, in seconds. Half of it applies once the control store has reported the death."""
_LONGEST_GAP_S = 5.0
"""Maximum time between two reads of the registry that counts toward a worker's time without an
entry, in seconds. A longer gap may only mean that the supervisor itself was stopped."""

_STALE_S = 5.0
"""Time without a renewal after which a registry entry counts as missing, in seconds. The TTL of the
entry applies instead if it is longer. Such an entry exists only because the clock of Redis was set
back."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class SlotObservation:
    """The observed state of a slot."""

    observed: Observed
    error: str = ""
    """Why the slot has no worker; empty if it has one."""
    cause: DeathCause = DeathCause.UNKNOWN
    """The kind of ``error``."""
    pid: int = 0
    node: str = ""
    """Ray's id of the worker's node."""
    outdated: bool = False
    """Whether the worker was started with another configuration or version than a new one
    would."""
    progress: int = 0
    """How far the worker's start is: see ``StartProgress.count``."""


_ABSENT = SlotObservation(Observed.ABSENT)
_WHEREABOUTS = TypeAdapter(Whereabouts)


class RaySlots:
    """The workers' slots of one cluster."""

    def __init__(
        self,
        settings: Callable[[str], ActorSettings],
        list_registry: Callable[[], Awaitable[Mapping[str, Hashable] | None]],
        registry_ttl_s: float,
        term: SupervisorTerm,
        evidence: DeathEvidence,
        actor_class: type = WorkerActor,
        config_hash: str = "",
    ) -> None:
        """``settings`` returns the settings of a slot's worker.

        ``list_registry`` returns the slots whose workers the registry lists, each with a value that
        every renewal of its entry changes; None if the registry cannot be read. ``registry_ttl_s``
        is the TTL of these entries in seconds. ``term`` has the epoch of orders to workers.
        ``evidence`` is that of this process's node.
        ``config_hash`` is the hash with which new workers are started.
        """
        self._config_hash = config_hash
        self._settings = settings
        self._list_registry = list_registry
        self._listed: Collection[str] | None = None
        self._renewals = SilenceWatch[str](max(_STALE_S, registry_ttl_s))
        self._refreshed_at = time.monotonic()
        self._term = term
        self._actor_class = actor_class
        self._thread = DaemonThread("ray slots")
        self._far_ends = DaemonThread("far ends")
        self._incarnations: dict[str, _Incarnation] = {}
        self._missed: dict[str, Death] = {}
        self._evidence = evidence
        self._tasks: set[asyncio.Task[None]] = set()
        self._death = asyncio.Event()

    async def find_running(self) -> None:
        """Find the workers that already run, and observe them from now on. Raises what Ray
        raises."""
        for worker in await self._thread.call(find_all):
            if worker.slot not in self._incarnations:
                self._incarnations[worker.slot] = self._observed(worker, adopted=True)

    async def find_missed(self, slot: str, pid: int) -> None:
        """Record why the worker of a slot has died while no supervisor ran. The next look at the
        slot returns that.

        ``pid`` is the process id that the last supervisor has published.
        """
        end = ActorEnd(EndKind.PROCESS, "its process has ended, and no supervisor saw it")
        try:
            error = await self._thread.call(lambda: death_of(slot, pid))
        except Exception as failure:
            log.info("%s: Ray does not say why it has ended: %s", slot, failure)
        else:
            end = end if error is None else actor_end(error)
        self._missed[slot] = explain(await self._evidence.of(slot, end, None))

    def _observed(self, worker: RayWorker, *, adopted: bool = False) -> _Incarnation:
        return _Incarnation(worker, self._term, self._death.set, adopted=adopted)

    @property
    def names(self) -> Collection[str]:
        """Return the slots with a worker."""
        return self._incarnations.keys()

    @property
    def highest_epoch(self) -> int:
        """Return the highest epoch that a running worker has reported."""
        return max((one.highest_epoch for one in self._incarnations.values()), default=0)

    async def death(self) -> None:
        """Wait until a worker dies. A death that was already observed does not count."""
        await self._death.wait()

    async def refresh(self) -> None:
        """Read the workers' registry. Call this once before ``observe`` is called for the slots."""
        self._death.clear()
        self._evidence.look()
        entries = await self._list_registry()
        now = time.monotonic()
        passed = min(now - self._refreshed_at, _LONGEST_GAP_S)
        self._refreshed_at = now
        if entries is None:
            self._listed = None
        else:
            self._renewals.tick(entries, now)
            self._listed = {slot for slot in entries if not self._renewals.is_silent(slot)}
        for slot, incarnation in self._incarnations.items():
            # An empty registry is no evidence about this worker.
            lost = self._listed is not None and slot not in self._listed and len(self._listed) > 0
            incarnation.unlisted_s = incarnation.unlisted_s + passed if lost else 0.0

    async def observe(self, slot: str) -> SlotObservation:
        """Return the current state of a slot, without waiting for the worker's next answer.

        Raises BatonError when Ray's notifications no longer reach this process.
        """
        incarnation = self._incarnations.get(slot)
        if incarnation is None:
            missed = self._missed.pop(slot, None)
            return _ABSENT if missed is None else _death(missed)
        now = time.monotonic()
        seen = replace(incarnation.look(now), outdated=incarnation.is_outdated(self._config_hash))
        if seen.observed in (Observed.SILENT, Observed.STARTING, Observed.UNPLACED):
            self._doubt(slot, incarnation, now)
        if seen.observed is Observed.STARTING and incarnation.watched is None:
            incarnation.watched = self._evidence.find(slot)
        if seen.observed is Observed.ABSENT:
            del self._incarnations[slot]
            assert incarnation.end is not None, "it is absent"
            known = await self._evidence.of(slot, incarnation.end, incarnation.watched)
            incarnation.close()
            if incarnation.failed_to_start:
                # A failed worker's process stays until it is ended, so that it can report why.
                self._in_background(self._kill(incarnation))
            else:
                self._in_background(self._clear(incarnation))
            return _death(explain(known))
        is_listed = self._listed is None or slot in self._listed
        # A worker that the registry lists, or may list, is not silent. One that another supervisor
        # has started may serve although Ray does not pass on its first answer.
        may_serve = seen.observed is Observed.SILENT or (
            seen.observed is Observed.STARTING and incarnation.adopted
        )
        return replace(seen, observed=Observed.SERVING) if may_serve and is_listed else seen

    def _doubt(self, slot: str, incarnation: _Incarnation, now: float) -> None:
        """Query Ray's control store about a worker that does not answer pings. Either the worker is
        silent, or it is dead and Ray's notification was lost. Raises BatonError in the second
        case."""
        if incarnation.dead_since is not None and now - incarnation.dead_since > _DEAF_S / 2:
            raise BatonError(
                f"Ray reports {slot} dead but sent no notification; the supervisor must restart"
            )
        if not incarnation.doubted and incarnation.silent_s(now) > ANSWER_S + _DEAF_S:
            incarnation.doubted = True
            self._in_background(self._query_ray(slot, incarnation))

    async def _query_ray(self, slot: str, incarnation: _Incarnation) -> None:
        try:
            known = await self._thread.call(lambda: is_known(slot))
            if known and not incarnation.was_placed:
                waits = await self._thread.call(incarnation.worker.waits_for_node)
                incarnation.was_placed, incarnation.waits_for_node = not waits, waits
        except Exception as error:
            log.warning("%s: Ray does not report whether it runs: %s", slot, error)
            known = True
        incarnation.dead_since = None if known else time.monotonic()
        incarnation.doubted = not known

    async def start(self, slot: str) -> None:
        """Make Ray place a worker in the slot. Raises what Ray raises."""
        settings = self._settings(slot)

        def start() -> RayWorker:
            try:
                return place(settings, self._actor_class)
            except ValueError:
                # An earlier call seemed lost, but was not.
                found = find(slot)
                if found is None:
                    raise
                return found

        self._incarnations[slot] = self._observed(await self._thread.call(start))

    async def drain(self, slot: str, deadline_s: float) -> None:
        """Make a worker reject new requests and exit by itself. Raises what Ray raises."""
        incarnation = self._incarnations.get(slot)
        if incarnation is not None:
            async with asyncio.timeout(ANSWER_S):
                await incarnation.worker.drain(deadline_s, self._term.epoch)

    async def end(self, slot: str) -> None:
        """End the process of the slot's worker, even if the process is frozen; idempotent. Raises
        what Ray raises."""
        incarnation = self._incarnations.get(slot)
        if incarnation is not None:
            await self._kill(incarnation)

    async def _kill(self, incarnation: _Incarnation) -> None:
        # Ray reports a stopped worker (SIGSTOP) dead, although it could not end it.
        if incarnation.whereabouts is not None:
            self._end_process(incarnation.worker.slot, incarnation.whereabouts)
        await self._clear(incarnation, incarnation.worker.kill)

    async def _clear(
        self, incarnation: _Incarnation, first: Callable[[], None] = lambda: None
    ) -> None:
        """Call ``first``. Then end the other ranks of a worker that has ended, and remove the
        worker's placement group.

        A rank that was stopped (SIGSTOP) does not end by itself. Raises what Ray raises.
        """
        slot = incarnation.worker.slot
        for rank in incarnation.other_ranks:
            self._end_process(slot, rank)
        has_places = self._settings(slot).own_pool().ranks > 1

        # Both happen in one call, before the next incarnation's places are requested.
        def clear() -> None:
            first()
            if has_places:
                remove_places(slot)

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
            # The node may be gone, and the process with it.
            log.info("%s was not ended on its node: %s", slot, reason(error))

    def _in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def close(self) -> None:
        """Stop observing the workers. They continue to run."""
        for incarnation in self._incarnations.values():
            incarnation.close()


def _death(death: Death) -> SlotObservation:
    return SlotObservation(Observed.ABSENT, death.text, death.cause)


class _Incarnation:
    """One incarnation of a worker. Its state is derived from the worker's answers to pings."""

    def __init__(
        self,
        worker: RayWorker,
        term: SupervisorTerm,
        tell_death: Callable[[], None],
        *,
        adopted: bool,
    ) -> None:
        self.worker = worker
        self.adopted = adopted
        """Whether it ran before this supervisor."""
        self._term = term
        self._tell_death = tell_death
        self.highest_epoch = 0
        """The highest epoch that the worker has seen, by its last answer."""
        self.whereabouts: Whereabouts | None = None
        """The worker's process and node; None until the worker serves."""
        self.other_ranks: list[Whereabouts] = []
        """Processes and nodes of the worker's other ranks."""
        self.watched: ExitWatch | None = None
        """The worker's process; None until it is known."""
        self.end: ActorEnd | None = None
        """How the worker has ended; None before."""
        self.failed_to_start = False
        self.unlisted_s = 0.0
        """Time in seconds for which this worker was missing in the registry while other workers
        were listed."""
        self.doubted = False
        """Whether Ray's control store is being queried about this worker, or has reported it
        dead."""
        self.dead_since: float | None = None
        """Time at which Ray's control store first reported this worker dead, monotonic."""
        self._config_hash = ""
        """Hash of the worker's configuration; empty for a worker of Baton 0.1.0."""
        self.was_placed = False
        """Whether Ray is known to have placed the worker on a node."""
        self.waits_for_node = False
        """Whether Ray has found no node with room for the worker yet."""
        self._progress = 0
        self._serves = False
        self._leaves = False
        self._asked_at = time.monotonic()
        self._answered_at = self._asked_at
        self._asking = asyncio.create_task(self._ask())

    def look(self, now: float) -> SlotObservation:
        """Evaluate the worker's answer to the last ping, send the next ping, and return the slot's
        state."""
        if not self._asking.done():
            return self._seen(silent=self._serves and now - self._asked_at > ANSWER_S)
        error = self._asking.exception()
        if error is None:
            self._record(self._asking.result(), now)
        elif isinstance(error, WorkerFailed):
            self.failed_to_start = True
            cause = error.__cause__
            self.end = actor_end(cause if cause is not None and is_death(cause) else error)
            return _ABSENT
        elif is_death(error):
            self.end = actor_end(error)
            return _ABSENT
        self._asked_at = now
        self._asking = asyncio.create_task(self._ask())
        return self._seen(silent=self._serves and now - self._answered_at > ANSWER_S)

    def silent_s(self, now: float) -> float:
        """Return the seconds since the worker's last answer."""
        return now - self._answered_at

    def is_outdated(self, config_hash: str) -> bool:
        """Whether the worker serves and was started with another hash than ``config_hash``."""
        return self._serves and self._config_hash != config_hash

    async def _ask(self) -> dict[str, Any] | int | tuple[PingReply, int]:
        try:
            if not self._serves:
                return await self.worker.ready()
            return await self.worker.ping(self.unlisted_s, self._term.epoch)
        except Exception as error:
            if isinstance(error, WorkerFailed) or is_death(error):
                self._tell_death()
            raise

    def _record(self, answer: dict[str, Any] | int | tuple[PingReply, int], now: float) -> None:
        self._answered_at, self.was_placed, self.waits_for_node = now, True, False
        if isinstance(answer, int):
            self._progress = answer
            return
        if isinstance(answer, tuple):
            reply, self.highest_epoch = answer
            self._leaves = reply is PingReply.LEAVING
            return
        self._serves, self.unlisted_s = True, 0.0
        self._config_hash = str(answer.get("config_hash", ""))
        self.whereabouts = _WHEREABOUTS.validate_python(answer)
        if self.watched is None or self.watched.process != self.whereabouts.process:
            self._forget()
            self.watched = ExitWatch(self.whereabouts.process)
        self.other_ranks = [_WHEREABOUTS.validate_python(rank) for rank in answer["other_ranks"]]

    def _seen(self, *, silent: bool) -> SlotObservation:
        if not self._serves:
            starts = Observed.UNPLACED if self.waits_for_node else Observed.STARTING
            return SlotObservation(starts, progress=self._progress)
        observed = Observed.LEAVING if self._leaves else Observed.SERVING
        assert self.whereabouts is not None, "it serves"
        pid, node = self.whereabouts.process.pid, self.whereabouts.node
        return SlotObservation(Observed.SILENT if silent else observed, pid=pid, node=node)

    def close(self) -> None:
        self._asking.cancel()
        self._forget()

    def _forget(self) -> None:
        if self.watched is not None:
            self.watched.close()
