"""Turns: limit the expensive operations that run at a time, and share them among tenants.

    asked ─one is free→ held ─the work ends→ free
    asked ─none is free→ waiting ─round robin over tenants→ held
    waiting ─``MAX_WAIT_S`` later→ refused (429)
    asked ─the tenant has ``max_waiting`` waiting→ refused (429)

One tenant holds at most all turns but one. So work of another tenant waits at most until earlier
work ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager

from baton.errors import Overloaded

MAX_WAIT_S = 30.0
"""Maximum wait for a turn, in seconds."""
MAX_WAITING = 128
"""Maximum number of waiting operations of one tenant."""
RETRY_AFTER_S = 1.0


class FairTurns:
    """Limits how many expensive operations run at a time, and shares the turns to run among
    tenants. Owned by one event loop."""

    def __init__(
        self,
        what: str,
        at_once: int,
        *,
        max_waiting: int = MAX_WAITING,
        max_wait_s: float = MAX_WAIT_S,
    ) -> None:
        """Let ``at_once`` operations run at a time, at least 2. ``what`` names the operations in
        errors."""
        self._what = what
        self._free = at_once
        self._max_share = at_once - 1
        self._max_waiting = max_waiting
        self._max_wait_s = max_wait_s
        self._held: Counter[Hashable] = Counter()
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}
        """Waiting futures by tenant, in the order of the tenants' next turns. No deque is empty."""

    @asynccontextmanager
    async def turn(self, tenant: Hashable) -> AsyncIterator[None]:
        """Wait until the tenant may run an operation, and hold this turn during the block. Raises
        Overloaded if too many operations of the tenant wait, or if the wait is too long."""
        if not self._take(tenant):
            await self._wait(tenant)
        try:
            yield
        finally:
            self._give_back(tenant)

    def _take(self, tenant: Hashable) -> bool:
        if tenant in self._waiting or not self._may_have(tenant):
            return False
        self._free -= 1
        self._held[tenant] += 1
        return True

    def _may_have(self, tenant: Hashable) -> bool:
        return self._free > 0 and self._held[tenant] < self._max_share

    async def _wait(self, tenant: Hashable) -> None:
        line = self._waiting.setdefault(tenant, deque())
        if len(line) >= self._max_waiting:
            raise Overloaded(
                f"{len(line)} {self._what} of this tenant are already waiting; try again later",
                retry_after=RETRY_AFTER_S,
            )
        mine = asyncio.get_running_loop().create_future()
        line.append(mine)
        try:
            async with asyncio.timeout(self._max_wait_s):
                await mine
        except BaseException as error:
            if mine.done() and not mine.cancelled():
                # The turn was given at the moment the wait ended.
                self._give_back(tenant)
            else:
                self._leave(tenant, mine)
            if isinstance(error, TimeoutError):
                raise Overloaded(
                    f"other {self._what} took all turns for {self._max_wait_s:g} s",
                    retry_after=RETRY_AFTER_S,
                ) from None
            raise

    def _leave(self, tenant: Hashable, mine: asyncio.Future[None]) -> None:
        line = self._waiting.get(tenant)
        if line is not None and mine in line:
            line.remove(mine)
            if not line:
                del self._waiting[tenant]

    def _give_back(self, tenant: Hashable) -> None:
        self._free += 1
        self._held[tenant] -= 1
        if not self._held[tenant]:
            del self._held[tenant]
        self._pass_on()

    def _pass_on(self) -> None:
        """Give free turns to waiting operations, one to each tenant in round-robin order."""
        for tenant in list(self._waiting):
            if not self._free:
                return
            if not self._may_have(tenant):
                continue
            line = self._waiting.pop(tenant)
            while line and line[0].done():
                # This wait was cancelled, but is still in the queue.
                line.popleft()
            if line:
                self._free -= 1
                self._held[tenant] += 1
                line.popleft().set_result(None)
            if line:
                self._waiting[tenant] = line
