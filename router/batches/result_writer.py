"""Stores the results of one batch: those of a short time together, since each storing has a cost.

    added ─gathered for a while, or enough→ being stored ─→ stored

Owned by the event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable

from baton.errors import StorageFull, Unavailable
from router.batches.storage.batch import Batch, LineResult
from router.batches.storage.database import NoSpace
from router.batches.storage.store import BatchStore

MAX_GATHERED = 256
"""Number of results after which they are stored at once."""
MAX_GATHERED_BYTES = 4 << 20
PATIENCE_S = 60.0
"""Time for which storing is tried again while the store does not answer, in seconds. Afterwards the
lines are run again."""
_PAUSE_S = 1.0
END_S = 4.0
"""Maximum time for storing the last results of a batch that is stopped, in seconds."""


class ResultWriter:
    """Stores results of a batch that this process owns, in order of their arrival."""

    def __init__(
        self,
        store: BatchStore,
        batch: Batch,
        on_stored: Callable[[LineResult], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Create a writer. ``on_stored`` is called with each result that is stored."""
        self._store = store
        self._batch = batch
        self._on_stored = on_stored
        self._clock = clock
        self._patience_s = PATIENCE_S
        self._gathered: list[LineResult] = []
        self._bytes = 0
        self._storing = asyncio.Lock()

    async def add(self, result: LineResult, group: asyncio.TaskGroup) -> None:
        """Add a result. If the store gathers results, a task of ``group`` stores it later, and only
        a caller whose result fills a piece waits for it. Raises the errors of
        ``BatchStore.add_results``."""
        self._gathered.append(result)
        self._bytes += result.size
        full = len(self._gathered) >= MAX_GATHERED or self._bytes >= MAX_GATHERED_BYTES
        if full or not self._store.gather_s:
            await self.flush()
        elif len(self._gathered) == 1:
            group.create_task(self._flush_later())

    async def _flush_later(self) -> None:
        await asyncio.sleep(self._store.gather_s)
        await self.flush()

    async def flush(self) -> None:
        """Store the results that were added so far. What has begun goes on if the caller is
        cancelled."""
        storing = asyncio.create_task(self._store_gathered())
        storing.add_done_callback(_retrieve)
        await asyncio.shield(storing)

    async def end(self) -> None:
        """Store the last results of a batch that is stopped, without trying again. Errors are
        dropped, and cancellations wait."""
        self._patience_s = 0.0
        storing = asyncio.create_task(self._store_gathered())
        storing.add_done_callback(_retrieve)
        until = self._clock() + END_S
        while not storing.done() and self._clock() < until:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.wait([storing], timeout=until - self._clock())

    async def _store_gathered(self) -> None:
        async with self._storing:
            results, self._gathered, self._bytes = self._gathered, [], 0
            if results:
                await self._add(results)

    async def _add(self, results: list[LineResult]) -> None:
        began = self._clock()
        while True:
            try:
                await self._store.add_results(self._batch, results)
            except NoSpace:
                # Store those that fit.
                if len(results) == 1:
                    raise
                half = len(results) // 2
                await self._add(results[:half])
                return await self._add(results[half:])
            except (Unavailable, StorageFull):
                # Perhaps they are stored. Storing them again changes nothing.
                if self._clock() - began >= self._patience_s:
                    raise
            else:
                for result in results:
                    self._on_stored(result)
                return None
            await asyncio.sleep(_PAUSE_S)


def _retrieve(task: asyncio.Task[None]) -> None:
    """Mark a task's error as retrieved: perhaps no task waits for it any more."""
    if not task.cancelled():
        task.exception()
