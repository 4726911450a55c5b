"""One worker process, in either role.

    starting ─start()→ ready ─stop()→ stopping → gone;
    ready ─drain()→ draining (accepts nothing) ─nothing left, or the deadline→ stopping;
    ready ─change_role()→ draining → ready, in the other role;

    ready, draining ─a background task fails, a rank is lost→ failed (run() raises);
    any after start() ─the device is lost, steps fail in a row, a rank is lost on a CUDA device→
        the process ends at once;

    ready ─it stood still, and the registry reports that its lease lapsed→ ready, in a new session;
    ready ─its lease lapsed while it could not renew it→ leaving;
    leaving ─nothing runs any more, or LEAVE_S have passed→ ready, in a new session

A session (``worker/session.py``) has an incarnation. The runtime (``worker/runtime.py``) outlives
it: engine, cached blocks and KV tiers, metrics.

Everything except the engine's steps and the copying of blocks runs on one event loop. The code that
renews leases never waits for Redis: the registry entry has its own task
(``worker/registry/own_entry.py``).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import redis
import torch

from baton.errors import InvalidRequest, Unavailable, WorkerFailed
from baton.host.background import end_tasks, watch_loop
from baton.host.process_end import Fail, fail
from baton.store.redis_client import redis_client
from baton.store.registry import DRAINING, Registry, WorkerRecord
from engine.parallel.ranks import Leader
from worker.core.engine_core import ENGINE_HANG_S
from worker.device.pool_memory import PoolMemory
from worker.engine_start import Measure, StartEngine, measure, start_engine
from worker.registry.index_publisher import keep_published
from worker.registry.own_entry import OwnEntry
from worker.role import RoleFactory, WorkerContext
from worker.runtime import TICKS, WorkerRuntime, load_runtime
from worker.session import WorkerSession
from worker.settings import WorkerSettings

log = logging.getLogger(__name__)

STOP_DEADLINE_S = 10.0
"""Maximum seconds to wait until each part of the worker has stopped."""
LEAVE_S = 30.0
"""Maximum seconds for which sequences keep running after their session's registry entry has
lapsed."""
SEEN_S = 1.0
"""Minimum seconds for which a draining worker rejects requests before it stops.

Routers read the registry four times a second. If the worker stopped sooner, they would count it as
dead.
"""
_POLL_S = 0.02
_SUCCESSOR_S = 2.0
"""Interval at which a draining worker that is the last of its fingerprint looks for another one, in
seconds; also the time limit of a look."""
_LAPSED = "the registry says that its lease has lapsed"


class WorkerProcess:
    """One worker: builds the engine, serves gRPC and metrics, and keeps the registry entry
    alive."""

    def __init__(
        self,
        settings: WorkerSettings,
        roles: Mapping[str, RoleFactory],
        start_engine: StartEngine = start_engine,
        measure: Measure = measure,
        fail: Fail = fail,
    ) -> None:
        """``roles`` maps each role's name to the factory that makes the role.

        ``start_engine`` makes the engine, and ``measure`` returns what its steps cost. ``fail``
        ends the process at once, with a reason; any thread may call it.
        """
        self.settings = settings
        self._start_engine, self._measure = start_engine, measure
        self._fail = fail
        self.drained = False
        """Whether a drain has ended, after which the process ends."""
        self.leave_by: float | None = None
        """Time by which the current drain must end, in seconds of the monotonic clock."""
        self.beats = 0
        """Number of the worker's heartbeats so far; other threads may read it."""
        self._roles = roles
        self._session: WorkerSession | None = None
        self._changing = asyncio.Lock()
        self._ending: asyncio.Task[None] | None = None
        self._left_nothing = False
        self._is_hurried = False
        """Whether the current drain must end now."""
        self._redis = redis_client(settings.redis_url)
        self._registry = Registry(self._redis, settings.cluster_id)
        self._entry = OwnEntry(
            self._registry,
            ttl_s=settings.config.advanced.registry_ttl_s,
            heartbeat_s=settings.config.advanced.heartbeat_s,
            record=self._current_record,
            timed=self._timed_registry_call,
            lost=self._lost_entry,
        )
        self._lapsed_by: float | None = None
        """If the registry entry has lapsed: the time by which the session ends at the latest, in
        seconds of the monotonic clock.

        None while the entry has not lapsed.
        """
        self._condemned = asyncio.Event()
        """Event that is set when the registry entry has lapsed. The next heartbeat then runs at
        once, and can replace the session."""
        self._memory = PoolMemory(shared=settings.config.transport in ("auto", "shm"))
        self._tasks: list[asyncio.Task[None]] = []
        self._stopped = asyncio.Event()
        ranks = settings.pool.ranks
        self.lead = Leader(settings.group_host, ranks) if ranks > 1 else None
        """Connection to the worker's other ranks, which connect to ``lead.address``. None if there
        is only one rank."""

    @property
    def session(self) -> WorkerSession:
        """The current session; the worker must have started."""
        assert self._session is not None, "not started"
        return self._session

    @property
    def record(self) -> WorkerRecord | None:
        """The worker's registry record; None before it has started."""
        return None if self._session is None else self._session.record

    @property
    def context(self) -> WorkerContext | None:
        """The context of the current role; None before the worker has started."""
        return None if self._session is None else self._session.context

    @property
    def is_ready(self) -> bool:
        """Whether routers may send work here: the worker is registered, and does not drain. Any
        thread may read it."""
        session = self._session
        return (
            session is not None
            and self._entry.is_known
            and not self._stopped.is_set()
            and session.record.state != DRAINING
        )

    # Start and end

    async def start(self) -> WorkerRecord:
        """Load the model, start serving, and register the worker. Raises BatonError.

        If Redis is unreachable, no router knows the worker yet: a later heartbeat registers it.
        """
        runtime = await load_runtime(
            self.settings, self._memory, self.lead, self._start_engine, self._measure, self._end
        )
        await self._begin_session(runtime)
        runtime.start()
        await self._entry.write()
        gauges = runtime.gauges
        published = keep_published(
            lambda: self.session.publisher,
            self.settings.config.advanced.heartbeat_s,
            timed=gauges.index_call,
            report=gauges.index_published,
        )
        self._tasks = [
            asyncio.create_task(self._heartbeat(), name="heartbeat"),
            asyncio.create_task(self._entry.keep(), name="registry-entry"),
            asyncio.create_task(published, name="publish"),
            asyncio.create_task(self._tick(), name="own-lease"),
            asyncio.create_task(watch_loop(gauges.loop_lag), name="loop-lag"),
        ]
        if runtime.tiers is not None:
            self._tasks.append(asyncio.create_task(runtime.tiers.run(), name="tier-spill"))
        if self.lead is not None:
            self._watch_ranks(self.lead, runtime.core.engine.runner.device)
        return self.session.record

    def _watch_ranks(self, lead: Leader, device: torch.device) -> None:
        """From now on, end the worker when another of its ranks is lost."""
        if device.type == "cuda":
            # Ends at once, on the thread that notices: the GPU may be inside a collective
            # operation that never ends, and an orderly stop would wait for it.
            lead.lost.add_done_callback(lambda lost: self._end(lost.result().splitlines()[0]))
        else:
            self._tasks.append(asyncio.create_task(_raise_lost(lead), name="ranks"))

    async def run(self) -> None:
        """Wait until the worker has stopped. Raises the error of the background task that failed,
        if one did."""
        stopped = asyncio.create_task(self._stopped.wait())
        try:
            done, _ = await asyncio.wait(
                [stopped, *self._tasks], return_when=asyncio.FIRST_COMPLETED
            )
            for task in done:
                # Tasks that stop() has cancelled may have ended before this one is woken.
                if not (task is stopped or (task.cancelled() and self._stopped.is_set())):
                    task.result()
        finally:
            stopped.cancel()

    def _end(self, reason: str) -> None:
        """End the process at once, with ``reason`` in the message. Any thread may call this."""
        self._fail(f"worker {self.settings.slot} ends: {reason}")

    async def ended(self) -> None:
        """Wait until the worker has stopped after a drain, if one was requested."""
        if self._ending is not None:
            await self._ending

    async def stop(self) -> None:
        """Remove the worker's registry entry, end what is in flight, and stop serving;
        idempotent."""
        if self._stopped.is_set():
            return
        self._stopped.set()
        await end_tasks(self._tasks)
        if self._session is not None:
            await self._end_session()
            await self._session.runtime.stop(STOP_DEADLINE_S)
        if self.lead is not None:
            await asyncio.to_thread(self.lead.close)
        await self._redis.aclose()
        self._memory.close()

    # Sessions

    async def _begin_session(self, runtime: WorkerRuntime) -> None:
        self._session = await WorkerSession.begin(
            self.settings, runtime, self._roles, self, self._redis
        )
        self._entry.begin()
        self._lapsed_by = None

    async def _replace_session(self, reason: str) -> None:
        """End the session, and begin another one with the same runtime.

        Raises TimeoutError if the engine does not end the old session's steps.
        """
        old = self.session
        log.warning("%s ends: %s", old.context.incarnation, reason)
        await self._end_session()
        async with asyncio.timeout(STOP_DEADLINE_S):
            # Steps and copies in flight report their ends to the event loop.
            while not old.is_over:  # noqa: ASYNC110
                await asyncio.sleep(_POLL_S)
        await self._begin_session(old.runtime)

    async def _end_session(self) -> None:
        """Remove the registry entry, and end everything that runs in the session with an error."""
        await self._entry.remove()
        await self.session.end()

    async def _replace_lapsed(self, now: float) -> None:
        """If the current session's registry entry has lapsed, replace the session. This is done
        once nothing runs in the session, or its time is over."""
        if self.drained or self._lapsed_by is None:
            return
        if now >= self._lapsed_by or self.session.is_empty:
            await self._replace_session(_LAPSED)

    def _lost_entry(self, stood_still: bool) -> None:
        """Accept no more work, because the registry entry has lapsed: all other processes consider
        this session as ended."""
        self.session.refuse_work()
        # Routers have dropped a worker that stood still. Otherwise it can still be reached.
        self._lapsed_by = time.monotonic() + (0.0 if stood_still else LEAVE_S)
        self._condemned.set()

    def _current_record(self) -> WorkerRecord:
        return self.session.current_record()

    def _timed_registry_call(self) -> AbstractContextManager[None]:
        return self.session.runtime.gauges.registry_call()

    # Draining, and role changes

    async def drain(self, deadline_s: float, *, finishes: bool = True) -> bool:
        """Accept no more work, wait until accepted work has ended, then stop the worker;
        idempotent.

        Returns whether all work had ended by the deadline. Remaining requests end with an error,
        and routers place them on other workers. If ``finishes`` is true, the deadline waits while
        no other ready worker of the same role and fingerprint is registered, since requests could
        go on nowhere: they then have until their own deadlines.
        """
        if self.leave_by is None:
            self.leave_by = time.monotonic() + deadline_s
        async with self._changing:
            if self._ending is None:
                is_empty = await self._empty(lambda: self.leave_by or 0.0, SEEN_S)
                if finishes and not is_empty:
                    is_empty = await self._finish()
                self._left_nothing = is_empty
                self.drained = True
                # A task of its own: the server that stops must still answer the caller.
                self._ending = asyncio.create_task(self.stop(), name="stop")
        return self._left_nothing

    def hurry(self) -> None:
        """End the current drain now, as if its deadline had passed."""
        self._is_hurried = True
        self.leave_by = time.monotonic()

    async def _finish(self) -> bool:
        """Wait until all accepted work has ended, as long as no other worker can take it over.
        Returns whether all work has ended."""
        is_empty = is_told = False
        while not (is_empty or self._is_hurried or await self._has_successor()):
            if not is_told:
                is_told = True
                log.warning(
                    "%s is the last ready %s worker of its model version (fingerprint %s): it ends"
                    " what it runs before it leaves",
                    *(self.settings.slot, self.settings.pool.role),
                    self.session.record.fingerprint,
                )
            if not self._is_hurried:
                self.leave_by = time.monotonic() + _SUCCESSOR_S
            is_empty = await self._empty(lambda: self.leave_by or 0.0, 0.0)
        return is_empty

    async def _has_successor(self) -> bool:
        """Return whether another ready worker could take over what this one runs. False if the
        registry cannot be read."""
        own = self.session.record
        try:
            async with asyncio.timeout(_SUCCESSOR_S):
                records, _ = await self._registry.read()
        except (redis.RedisError, OSError, TimeoutError):
            return False
        return any(
            (one.role, one.fingerprint, one.state) == (own.role, own.fingerprint, "ready")
            for one in records.values()
            if one.incarnation != own.incarnation
        )

    async def change_role(self, role: str, deadline_s: float) -> float:
        """Change to another role, and keep weights and caches. Returns the number of seconds that
        the change took.

        Raises InvalidRequest if the role is unknown or the worker's ranks cannot serve it, and
        Unavailable if the worker is stopping.
        """
        if role not in self._roles:
            raise InvalidRequest(f"role {role!r} is unknown; known: {', '.join(self._roles)}")
        pool = self.settings.pool
        if pool.cp > 1 and role != pool.role:
            # A handoff would bring all blocks to rank 0.
            raise InvalidRequest(
                f"a worker whose {pool.cp} ranks divide prompts (cp) can only serve prefill:"
                " change the role of another worker"
            )
        began = time.monotonic()
        async with self._changing:
            if self._stopped.is_set() or self.drained:
                raise Unavailable("this worker is stopping")
            if role != self.settings.pool.role:
                end = time.monotonic() + deadline_s
                await self._empty(lambda: end, 0.0)
                if self._lapsed_by is not None:
                    # The entry has lapsed meanwhile, so leases of this session are void.
                    await self._replace_session(_LAPSED)
                await self._take_role(role)
        return time.monotonic() - began

    async def _empty(self, deadline: Callable[[], float], at_least_s: float) -> bool:
        """Refuse new work, and wait until all accepted work has ended or the deadline has passed.
        ``deadline`` is called again and again, because the deadline may change.

        Returns whether all work has ended.
        """
        session = self.session
        session.refuse_work()
        # Not awaited: Redis may hang for longer than the deadline.
        self._entry.write_soon()
        seen_at = time.monotonic() + at_least_s
        # Polls: sequences, tickets, calls and readers end in many places.
        while (now := time.monotonic()) < deadline():
            if now >= seen_at and session.is_empty:
                break
            await asyncio.sleep(_POLL_S)
        return session.is_empty

    async def _take_role(self, role: str) -> None:
        session = self.session
        await session.close_role()
        await self._steps_ended(session.context)
        self.settings = self.settings.in_role(role)
        session.change_role(self.settings)
        await self._entry.write()
        log.info("%s changed its role to %s", session.record.incarnation, role)

    async def _steps_ended(self, context: WorkerContext) -> None:
        """Wait until running steps have ended. They may still compute sequences that were ended at
        the deadline.

        Raises WorkerFailed if the engine hangs; the process then ends.
        """
        end = time.monotonic() + ENGINE_HANG_S
        while not context.core.scheduler.is_idle():
            if time.monotonic() >= end:
                reason = "its engine has not finished the steps of its previous role"
                self._end(reason)
                raise WorkerFailed(reason)
            await asyncio.sleep(_POLL_S)

    # In the background

    async def _heartbeat(self) -> None:
        """Run the session's heartbeats: renew leases, and end what has expired.

        It waits for Redis only between two sessions, and then for 2 s at most. Otherwise, peers
        would consider this worker dead when Redis is slow.
        """
        heartbeat_s = self.settings.config.advanced.heartbeat_s
        while True:
            began = time.monotonic()
            self._condemned.clear()
            if not self._changing.locked():
                # A drain or a role change ends first.
                async with self._changing:
                    await self._replace_lapsed(began)
            await self.session.heartbeat()
            self.beats += 1
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(began + heartbeat_s - time.monotonic()):
                    await self._condemned.wait()

    async def _tick(self) -> None:
        """Advance the clock of leases, and detect a pause of the process as soon as it runs
        again."""
        while True:
            await asyncio.sleep(self.settings.config.advanced.heartbeat_s / TICKS)
            self.session.runtime.clock.tick()
            self._entry.beat(time.monotonic())


async def _raise_lost(lead: Leader) -> None:
    """Wait until one of the worker's other ranks is lost. Raises WorkerFailed then."""
    raise WorkerFailed(await asyncio.wrap_future(lead.lost))
