"""Slots for the lines of batches: a bounded number run at a time, ordered by deadline."""

from __future__ import annotations

import asyncio
import heapq
import itertools
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

from router.batches.storage.batch import Batch

_Waiter = tuple[int, int, str, asyncio.Future[None]]


class BatchHeld(Exception):
    """Raised because a batch is on hold: none of its request lines may begin."""


class LineSlots:
    """Slots for running lines. Owned by the event loop.

    Between tenants, the one with the fewest slots per weight goes first. Among the batches of a
    tenant, the one whose window ends first does.
    """

    def __init__(self, count: int, weights: Mapping[str, float]) -> None:
        """Create ``count`` slots. ``weights`` gives the weights of tenants; a tenant that is not in
        it has weight 1."""
        self._free = count
        self._weights = weights
        self._taken: Counter[str] = Counter()
        self._waiting: defaultdict[str, list[_Waiter]] = defaultdict(list)
        self._numbers = itertools.count()
        self._held: set[str] = set()

    def hold(self, batch_id: str) -> None:
        """Reject the waiting lines of a batch, and new ones. Running lines end."""
        self._held.add(batch_id)
        for waiters in self._waiting.values():
            for _, _, name, turn in waiters:
                if name == batch_id and not turn.done():
                    turn.set_exception(BatchHeld(batch_id))

    def resume(self, batch_id: str) -> None:
        """Allow the lines of a batch to begin again, after ``hold``."""
        self._held.discard(batch_id)

    @asynccontextmanager
    async def slot(self, batch: Batch) -> AsyncIterator[None]:
        """Wait for a slot for one request line of ``batch``, and keep the slot until the end of the
        context. Raises BatchHeld."""
        if batch.id in self._held:
            raise BatchHeld(batch.id)
        if self._free > 0 and not self._has_waiters():
            self._take(batch.tenant)
        else:
            await self._wait(batch)
        try:
            yield
        finally:
            self._give_back(batch.tenant)

    async def _wait(self, batch: Batch) -> None:
        turn = asyncio.get_running_loop().create_future()
        waiter = (batch.expires_at, next(self._numbers), batch.id, turn)
        heapq.heappush(self._waiting[batch.tenant], waiter)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                # The slot was granted at the moment of the cancellation.
                self._give_back(batch.tenant)
            turn.cancel()
            raise

    def _take(self, tenant: str) -> None:
        self._free -= 1
        self._taken[tenant] += 1

    def _give_back(self, tenant: str) -> None:
        self._free += 1
        self._taken[tenant] -= 1
        self._taken += Counter()  # removes tenants without slots
        while self._free > 0 and self._has_waiters():
            next_tenant = min(self._waiting, key=self._load)
            *_, turn = heapq.heappop(self._waiting[next_tenant])
            self._take(next_tenant)
            turn.set_result(None)

    def _load(self, tenant: str) -> float:
        return self._taken[tenant] / self._weights.get(tenant, 1.0)

    def _has_waiters(self) -> bool:
        """Return whether any line waits, after removing cancelled ones."""
        for tenant, waiters in list(self._waiting.items()):
            while waiters and waiters[0][3].done():
                heapq.heappop(waiters)
            if not waiters:
                del self._waiting[tenant]
        return bool(self._waiting)
