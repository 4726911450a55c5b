"""Broadcasts snapshots: one task collects them for all viewers. Owned by the router's event loop.

    new ─start(), the first viewer→ unwatched ─a viewer comes→ watched ─the last leaves→ unwatched
    any ─close()→ closed

Without viewers it collects less often, for the history alone. Every viewer gets the latest
snapshot. A slow viewer misses the ones in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Protocol

from baton.errors import Overloaded, Unavailable
from baton.host.background import end_tasks, spawn
from baton.telemetry.logs import ErrorRow
from router.console.snapshot import Snapshot
from router.http.sse import to_json

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
"""Time between two snapshots while there are viewers, in seconds."""
UNWATCHED_S = 2.0
"""Time between two snapshots without viewers, in seconds."""
MAX_VIEWERS = 64


class Collect(Protocol):
    """Makes a snapshot. ``watched``: whether a viewer will see it."""

    async def __call__(self, *, watched: bool) -> Snapshot:
        """Make a snapshot."""


class SnapshotBroadcaster:
    """Sends snapshots as JSON to all viewers."""

    def __init__(
        self, collect: Collect, interval_s: float = INTERVAL_S, unwatched_s: float = UNWATCHED_S
    ) -> None:
        """Create a broadcaster. The intervals between snapshots, with viewers and without, are in
        seconds."""
        self._collect = collect
        self._interval_s = interval_s
        self._unwatched_s = unwatched_s
        self._task: asyncio.Task[None] | None = None
        self._changed = asyncio.Condition()
        self._came = asyncio.Event()
        """Set when the first viewer has come."""
        self._version = 0
        self._latest = ""
        """The latest snapshot as JSON; empty before the first one that a viewer can see."""
        self._closed = False
        self.viewers = 0

    def start(self) -> None:
        """Start to collect snapshots; idempotent."""
        if self._task is None and not self._closed:
            self._task = spawn(self._run(), "console")

    @asynccontextmanager
    async def viewer(self) -> AsyncIterator[None]:
        """Count the caller as a viewer within the context. Raises Overloaded, Unavailable."""
        if self._closed:
            raise Unavailable("the router is stopping")
        if self.viewers >= MAX_VIEWERS:
            raise Overloaded(
                f"{MAX_VIEWERS} viewers are the maximum; close another console", retry_after=10.0
            )
        if not self.viewers:
            # The viewer must not get an old snapshot.
            self._latest = ""
            self._came.set()
        self.viewers += 1
        self.start()
        try:
            yield
        finally:
            self.viewers -= 1

    async def after(self, version: int) -> tuple[int, str]:
        """Wait for a snapshot with a higher version than ``version``; 0 accepts any snapshot.
        Return its version and JSON.

        Raises Unavailable when the router stops.
        """
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or self._has_newer(version))
            if self._closed:
                raise Unavailable("the router is stopping")
            return self._version, self._latest

    def _has_newer(self, version: int) -> bool:
        return bool(self._latest) and self._version > version

    async def close(self) -> None:
        """End the waits of all viewers, and collect no more; idempotent."""
        self._closed = True
        async with self._changed:
            self._changed.notify_all()
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])

    async def _run(self) -> None:
        # The next snapshot may succeed, and viewers see that this one is missing.
        errors = ErrorRow(log, "the snapshot for the console failed")
        while True:
            begun = time.monotonic()
            self._came.clear()
            watched = self.viewers > 0
            with errors.caught():
                snapshot = await self._collect(watched=watched)
                if watched and self.viewers:
                    await self._publish(snapshot)
            interval_s = self._interval_s if self.viewers else self._unwatched_s
            with suppress(TimeoutError):
                async with asyncio.timeout(max(0.0, begun + interval_s - time.monotonic())):
                    await self._came.wait()

    async def _publish(self, snapshot: Snapshot) -> None:
        async with self._changed:
            self._version += 1
            self._latest = to_json(asdict(snapshot))
            self._changed.notify_all()
