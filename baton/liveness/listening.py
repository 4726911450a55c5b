"""Timers and a clock that count only the time in which this process listened.

Timers wait for signs of another process; the clock is for leases. Both follow the rule of
``baton.liveness.silence``: time in which this process stood still does not count.
``asyncio.timeout`` bounds work of this process. After a pause it fires before pending input is
read, so it cannot show that another process is dead; ``SilenceTimer`` can.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from baton.liveness.silence import SilenceWatch

_TIMER_TICKS = 8
"""Number of ticks into which a timer divides its limit."""


class SilenceTimer:
    """Calls ``on_silence`` after ``limit_s`` seconds of listening, unless it is cancelled before.

    Owned by the event loop in which it is made.
    """

    def __init__(self, limit_s: float, on_silence: Callable[[], None]) -> None:
        self._limit_s = limit_s
        self._on_silence = on_silence
        self._begun = time.monotonic()
        self._watch: SilenceWatch[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._next = self._loop.call_later(limit_s / _TIMER_TICKS, self._tick)

    def cancel(self) -> None:
        """End the timer; idempotent."""
        self._next.cancel()

    def _tick(self) -> None:
        # Most timers are cancelled before their first tick.
        if self._watch is None:
            self._watch = SilenceWatch(self._limit_s)
            self._watch.tick({None: None}, self._begun)
        if self._watch.tick({None: None}, time.monotonic()):
            self._on_silence()
        else:
            self._next = self._loop.call_later(self._limit_s / _TIMER_TICKS, self._tick)


@asynccontextmanager
async def listening(limit_s: float) -> AsyncIterator[asyncio.Timeout]:
    """Limit the time of the context's body, as ``asyncio.timeout`` does. Only seconds in which this
    process listened count.

    Raises TimeoutError.
    """
    loop = asyncio.get_running_loop()
    async with asyncio.timeout(None) as timeout:
        timer = SilenceTimer(limit_s, lambda: timeout.reschedule(loop.time()))
        try:
            yield timeout
        finally:
            timer.cancel()


class ListeningClock:
    """The clock of leases: it advances only while its owner can receive messages.

    A process that stood still (SIGSTOP, a suspended machine, a blocked event loop) has received
    nothing meanwhile, and its peers may have stood still with it. So the time between two ticks
    counts for at most ``max_s``: a lease of three seconds is three seconds in which the owner
    listened.

    A call returns the time in seconds, which never decreases. ``monotonic`` is in seconds. Owned
    by one event loop, which ticks it several times in the shortest lease.
    """

    def __init__(self, max_s: float, monotonic: Callable[[], float] = time.monotonic) -> None:
        self._max_s = max_s
        self._monotonic = monotonic
        self._ticked_at = self._time = monotonic()

    def __call__(self) -> float:
        passed = self._monotonic() - self._ticked_at
        return self._time + min(self._max_s, max(0.0, passed))

    def tick(self) -> None:
        """Note that the clock's owner runs. The owner calls this several times in the shortest
        lease."""
        self._time = self()
        self._ticked_at = self._monotonic()
