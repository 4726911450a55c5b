"""Timers for what another process should say, in asyncio: they count as ``baton.silence`` does.

``asyncio.timeout`` bounds what this process may take. After a pause it is due before what came
meanwhile is read: to tell that another process is dead takes one of these.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.silence import SilenceWatch

_TICKS = 8
"""In the time of a timer."""


class SilenceTimer:
    """Calls back once ``limit_s`` of listening are over, unless it is cancelled before.

    Owned by the event loop in which it is made.
    """

    def __init__(self, limit_s: float, on_silence: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_silence = on_silence
        self._begun = time.monotonic()
        self._watch: SilenceWatch[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(limit_s / _TICKS, self._tick)

    def cancel(self) -> None:
        """Idempotent."""
        self._next.cancel()

    def _tick(self) -> None:
        # Most timers are cancelled before their first tick.
        if self._watch is None:
            self._watch = SilenceWatch(self._limit_s)
            self._watch.tick({None: None}, self._begun)
        if self._watch.tick({None: None}, time.monotonic()):
            self._on_silence()
        else:
            self._next = self._loop.call_later(self._limit_s / _TICKS, self._tick)


@asynccontextmanager
async def listening(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """As ``asyncio.timeout``, in time that this process has listened. Raises TimeoutError."""
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        timer = SilenceTimer(limit_s, lambda: timeout.reschedule(loop.time()))
        try:
            yield timeout
        finally:
            timer.cancel()
