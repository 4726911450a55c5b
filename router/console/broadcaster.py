"""Broadcasts snapshots: one task collects them for all viewers. Owned by the router's event loop.

    idle ─the first viewer comes→ collecting ─the last one leaves→ idle;  any ─close()→ closed

Every viewer gets the latest snapshot. A slow viewer misses the ones in between.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import asdict

from baton.errors import Overloaded, Unavailable
from baton.host.background import end_tasks
from router.console.snapshot import Snapshot
from router.http.sse import to_json

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
MAX_VIEWERS = 64


class SnapshotBroadcaster:
    """Sends snapshots as JSON to all viewers. ``collect`` makes a snapshot; ``clear`` is called
    when the last viewer has left."""

    def __init__(
        self,
        collect: Callable[[], Awaitable[Snapshot]],
        clear: Callable[[], Awaitable[None]],
        interval_s: float = INTERVAL_S,
    ) -> None:
        self._collect = collect
        self._clear = clear
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        """Held while the task that collects snapshots is started or ended."""
        self._changed = asyncio.Condition()
        self._version = 0
        self._latest = ""
        """The latest snapshot as JSON; empty before the first one."""
        self._closed = False
        self.viewers = 0

    @asynccontextmanager
    async def viewer(self) -> AsyncIterator[None]:
        """Count the caller as a viewer within the context, so that snapshots are collected. Raises
        Overloaded, Unavailable."""
        if self.viewers >= MAX_VIEWERS:
            raise Overloaded(
                f"{MAX_VIEWERS} viewers are the maximum; close another console", retry_after=10.0
            )
        self.viewers += 1
        try:
            async with self._turn:
                if self._closed:
                    raise Unavailable("the router is stopping")
                if self._task is None:
                    self._task = asyncio.create_task(self._run(), name="console")
            yield
        finally:
            self.viewers -= 1
            if not self.viewers:
                await self._rest()

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
        """End the waits of all viewers; idempotent."""
        self._closed = True
        async with self._changed:
            self._changed.notify_all()
        async with self._turn:
            await self._stop()

    async def _rest(self) -> None:
        async with self._turn:
            # Another viewer may have connected.
            if not self.viewers:
                await self._stop()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
            # The next viewer must not get an old snapshot.
            self._latest = ""
            await self._clear()

    async def _run(self) -> None:
        while True:
            begun = time.monotonic()
            try:
                snapshot = await self._collect()
            except Exception:
                # The next snapshot may succeed, and viewers see that this one is missing.
                log.exception("the snapshot for the console failed")
            else:
                async with self._changed:
                    self._version += 1
                    self._latest = to_json(asdict(snapshot))
                    self._changed.notify_all()
            await asyncio.sleep(max(0.0, begun + self._interval_s - time.monotonic()))
