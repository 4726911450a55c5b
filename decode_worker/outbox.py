"""Tokens on their way to the routers: one message a step, with all sequences of a router.

Owned by the control loop. A router that reads slowly finds several steps in one message; what waits
for it is bounded by its sequences' ``max_tokens``.
"""

from __future__ import annotations

import asyncio
import contextlib

from baton.request import TokenOutput


class Outbox:
    """What one router is to be told. A stream that opens takes the place of the one before it."""

    def __init__(self, now: float) -> None:
        self._outputs: list[TokenOutput] = []
        self._filled = asyncio.Event()
        self._reader = 0
        self._is_read = False
        self._unread_since = now

    def put(self, output: TokenOutput) -> None:
        """Add an output to the next message."""
        self._outputs.append(output)

    def flush(self) -> None:
        """A step is over: what was put may go."""
        if self._outputs:
            self._filled.set()

    def hurry(self) -> None:
        """The next message is to go at once, whatever it has."""
        self._filled.set()

    def open(self) -> int:
        """A stream begins to read. Returns its number."""
        self._reader += 1
        self._is_read = True
        # The stream before it, if it still waits, finds that its time is over.
        self._filled.set()
        return self._reader

    def is_current(self, reader: int) -> bool:
        """Whether this stream is the one that is to read."""
        return reader == self._reader

    def close(self, reader: int, now: float) -> None:
        """A stream has ended."""
        if self.is_current(reader):
            self._is_read = False
            self._unread_since = now

    def unread_for(self, now: float) -> float:
        """Seconds since a stream was open; 0 while one is."""
        return 0.0 if self._is_read else now - self._unread_since

    async def wait(self, timeout_s: float) -> None:
        """Until there is something to take, or ``timeout_s`` are over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._filled.wait()

    def take(self) -> list[TokenOutput]:
        """What has gathered."""
        self._filled.clear()
        outputs, self._outputs = self._outputs, []
        return outputs
