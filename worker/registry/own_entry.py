"""This worker's entry in the registry, which a task of its own renews.

    none ─written→ kept ─written, again and again→ kept
    kept ─the registry says that it has lapsed→ lost ─begin, in another session→ none

Nothing else in the worker waits for Redis because of it.

The registry alone says whether a session is over; while it cannot be asked the session goes on.
That is safe for a worker that stood still, too. What routers have placed elsewhere meanwhile is
another attempt, and they accept only its tokens. What peers promised to this session has ended with
their leases. Messages for another incarnation are refused. And where all stood still, the registry
as well, no process has acted.

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager

import redis

from baton.store.registry import Registry, WorkerRecord
from worker.registry.own_lease import OwnLease

log = logging.getLogger(__name__)

CALL_S = 10.0
"""Maximum seconds of a call, all of its round trips included. A new connection takes about seven,
each of which has a deadline of a second of its own."""
FAREWELL_S = 2.0
"""Maximum seconds that a leaving worker waits for the removal: the entry lapses by itself."""


class OwnEntry:
    """See the module's text."""

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
        """``record`` returns that of the present session; ``timed`` goes around each call.

        ``lost`` is called when the entry has lapsed, with whether the worker stood still.
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
        """Set when the registry is to be asked at once."""
        self._turn = asyncio.Lock()
        """One call at a time, so that the last record that is sent counts."""

    @property
    def is_known(self) -> bool:
        """Whether the registry has heard of this session."""
        return self._lease.registered

    def begin(self) -> None:
        """Begin another session, with no entry yet: ``keep`` writes it at once."""
        self._lease.begin()
        self._is_lost = self._is_removed = False
        self._woken.set()

    def beat(self, now: float) -> None:
        """Note that the event loop runs. Call it several times in a heartbeat."""
        if self._lease.beat(now):
            log.warning("%s stood still", self._record().incarnation)
            self._woken.set()

    async def keep(self) -> None:
        """Write to the registry once in a heartbeat, and at once after a standstill."""
        while True:
            began = time.monotonic()
            self._woken.clear()
            await self.write()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(began + self._heartbeat_s - time.monotonic()):
                    await self._woken.wait()

    def write_soon(self) -> None:
        """Have ``keep`` say what has changed, without a wait."""
        self._woken.set()

    async def write(self) -> None:
        """Write this worker's record to the registry. Never raises an error of Redis.

        Does nothing after ``remove``: the worker would be listed again until the entry lapses.
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
            except (redis.RedisError, TimeoutError) as error:
                log.warning("the registry cannot be reached: %s", error)
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
        """Remove the entry: a worker that leaves is dead at once. Ignores errors of Redis.

        ``write`` does nothing until ``begin``.
        """
        self._is_removed = True
        with contextlib.suppress(redis.RedisError, TimeoutError):
            async with asyncio.timeout(FAREWELL_S), self._turn:
                await self._registry.remove(self._record().incarnation)
