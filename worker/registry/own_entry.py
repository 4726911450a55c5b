"""This worker's entry in the registry, which a task of its own renews.

    none ─written→ kept ─written, again and again→ kept
    kept ─the registry reports that it has lapsed→ lost ─begin, in another session→ none

Nothing else in the worker waits for Redis because of it.

Only the registry decides whether a session is over; while it is unreachable, the session continues.
That is safe for a worker that stood still, too. What routers have placed elsewhere meanwhile is
another attempt, and they accept only its tokens. Peers' promises to this session have ended with
their leases. Messages for another incarnation are refused. And if all processes stood still, the
registry included, none has acted.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

from baton.store.registry import Registry, WorkerRecord
from worker.registry.own_lease import OwnLease

log = logging.getLogger(__name__)

CALL_S = 10.0
"""Maximum seconds of a registry call with all its round trips.

A new connection takes about seven round trips, and each has its own deadline of one second.
"""
FAREWELL_S = 2.0
"""Maximum seconds for which a worker that stops waits until its registry entry is removed. If it is
not removed, the entry lapses by itself."""


class OwnEntry:
    """The registry entry of this worker."""

    def __init__(
        self,
        registry: Registry,
        *,
        ttl_s: float,
        heartbeat_s: float,
        record: Callable[[], WorkerRecord],
        timed: Callable[[], AbstractContextManager[None]],
        lost: Callable[[bool], None],
    ) -> None:
        """``record`` returns the current session's record; ``timed`` wraps each call of the
        registry.

        ``lost`` is called when the entry has lapsed. Its argument is true if the worker had stood
        still.
        """
        self._registry = registry
        self._ttl_s = ttl_s
        self._heartbeat_s = heartbeat_s
        self._record = record
        self._timed = timed
        self._on_lost = lost
        self._is_lost = False
        self._is_removed = False
        self._lease = OwnLease(ttl_s, heartbeat_s)
        self._woken = asyncio.Event()
        """Event that is set when ``keep`` must write to the registry at once."""
        self._turn = asyncio.Lock()
        """Lock that is held during a registry call. So the registry keeps the record that was sent
        last."""

    @property
    def is_known(self) -> bool:
        """Whether the current session was registered."""
        return self._lease.registered

    def begin(self) -> None:
        """Begin another session. It has no registry entry yet, so ``keep`` writes one at once."""
        self._lease.begin()
        self._is_lost = self._is_removed = False
        self._woken.set()

    def beat(self, now: float) -> None:
        """Record that the event loop runs. Call it several times per heartbeat."""
        if self._lease.beat(now):
            log.warning("%s stood still", self._record().incarnation)
            self._woken.set()

    async def keep(self) -> None:
        """Write the registry entry once per heartbeat, until cancelled. After a standstill of the
        worker, write it at once."""
        while True:
            began = time.monotonic()
            self._woken.clear()
            await self.write()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(began + self._heartbeat_s - time.monotonic()):
                    await self._woken.wait()

    def write_soon(self) -> None:
        """Make ``keep`` write the changed record soon; this call does not wait."""
        self._woken.set()

    async def write(self) -> None:
        """Write this worker's record to the registry. Never raises: no error on the way to Redis
        may end a worker that serves.

        Has no effect after ``remove``: the worker would otherwise be listed until the entry lapses.
        """
        async with self._turn:
            if self._is_removed:
                return
            asked_at = time.monotonic()
            record = self._record()
            renew = self._lease.registered and not self._is_lost
            try:
                with self._timed():
                    async with asyncio.timeout(CALL_S):
                        is_there = await self._registry.put(record, self._ttl_s, renew=renew)
            except Exception as error:
                log.warning("the registry cannot be reached: %s", str(error) or repr(error))
                return
        if record.incarnation != self._record().incarnation:
            return
        if is_there:
            self._lease.renewed(asked_at)
            return
        log.warning(
            "the registry entry of %s has lapsed: it accepts no new requests", record.incarnation
        )
        self._is_lost = True
        self._on_lost(self._lease.stood_still)

    async def remove(self) -> None:
        """Remove the entry, so that routers see at once that the worker is gone. Never raises.

        Afterwards ``write`` has no effect until ``begin`` is called.
        """
        self._is_removed = True
        with contextlib.suppress(Exception):
            async with asyncio.timeout(FAREWELL_S), self._turn:
                await self._registry.remove(self._record().incarnation)
