"""Spaces the lines of a batch in time."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable


class Pace:
    """Limits how many lines of a batch may begin per second. Owned by the event loop."""

    def __init__(self, lines_per_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        """Create a pace of ``lines_per_s`` lines per second; infinity means no limit."""
        self._lines_per_s = lines_per_s
        self._clock = clock
        self._last_at = -math.inf
        self._changed = asyncio.Event()
        self.stopped = False

    def change(self, lines_per_s: float) -> None:
        """Continue at ``lines_per_s`` lines per second, above 0."""
        if lines_per_s != self._lines_per_s:
            self._lines_per_s = lines_per_s
            self._changed.set()

    def stop(self) -> None:
        """Let no further line of the batch begin."""
        self.stopped = True
        self._changed.set()

    async def turn(self) -> bool:
        """Wait until the next line may begin, and return True; return False after ``stop``."""
        while not self.stopped:
            now = self._clock()
            wait_s = self._last_at + 1 / self._lines_per_s - now
            if wait_s <= 0:
                self._last_at = now
                return True
            self._changed.clear()
            try:
                async with asyncio.timeout(wait_s):
                    await self._changed.wait()
            except TimeoutError:
                continue
        return False
