"""One task looks at the cluster for all viewers. Owned by the router's event loop.

    idle ─the first viewer comes→ looking ─the last one leaves→ idle;  any ─close()→ closed

Every viewer gets the latest snapshot; one that reads slowly misses those between.
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

LOOK_S = 1.0
MAX_VIEWERS = 64


class Watch:
    """Snapshots as JSON. ``look`` makes one; ``clear`` ends a time of looking."""

    def __init__(
        self,
        look: Callable[[], Awaitable[Snapshot]],
        clear: Callable[[], Awaitable[None]],
        look_s: float = LOOK_S,
    ) -> None:
        self._look = look
        self._clear = clear
        self._look_s = look_s
        self._task: asyncio.Task[None] | None = None
        self._turn = asyncio.Lock()
        """Of those who start and end the task."""
        self._told = asyncio.Condition()
        self._version = 0
        self._latest = ""
        """Empty: nobody has looked yet."""
        self._closed = False
        self.viewers = 0

    @asynccontextmanager
    async def viewer(self) -> AsyncIterator[None]:
        """While it is entered the cluster is looked at. Raises Overloaded, Unavailable."""
        if self.viewers >= MAX_VIEWERS:
            raise Overloaded(f"{MAX_VIEWERS} viewers watch already", retry_after=10.0)
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
        """The first snapshot newer than ``version`` (0: any), once it is there.

        Raises Unavailable when the router stops.
        """
        async with self._told:
            await self._told.wait_for(lambda: self._closed or self._has_newer(version))
            if self._closed:
                raise Unavailable("the router is stopping")
            return self._version, self._latest

    def _has_newer(self, version: int) -> bool:
        return bool(self._latest) and self._version > version

    async def close(self) -> None:
        """No viewer is told anything more; idempotent."""
        self._closed = True
        async with self._told:
            self._told.notify_all()
        async with self._turn:
            await self._stop()

    async def _rest(self) -> None:
        async with self._turn:
            # Another one may have come meanwhile.
            if not self.viewers:
                await self._stop()

    async def _stop(self) -> None:
        task, self._task = self._task, None
        if task is not None:
            await end_tasks([task])
            # The next viewer is not shown what was long ago.
            self._latest = ""
            await self._clear()

    async def _run(self) -> None:
        while True:
            begun = time.monotonic()
            try:
                snapshot = await self._look()
            except Exception:
                # The next look may do better, and viewers see that this one is missing.
                log.exception("the cluster could not be looked at")
            else:
                async with self._told:
                    self._version += 1
                    self._latest = to_json(asdict(snapshot))
                    self._told.notify_all()
            await asyncio.sleep(max(0.0, begun + self._look_s - time.monotonic()))
