"""Passes the new output of many requests to their clients at once, instead of one by one.

    idle ─output→ due ─the next turn of the event loop→ delivered
                  due ─the pause after the last delivery→ delivered

A worker's message has tokens of many requests. Waking a task for each of them takes longer than the
rest of the work on a token. So the requests are collected, and delivered by one callback.

After a delivery that took long there is a pause of the same length. So if more output comes than
can be delivered one token at a time, tokens of one answer share an event instead of queueing.
Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

MAX_PAUSE_S = 0.005
"""Maximum seconds between the end of a delivery and the begin of the next one."""
_SHORT_S = 0.0005
"""Pauses shorter than this are left out: the event loop's timers count milliseconds."""


class Recipient(Protocol):
    """A request with output that its client has not got."""

    def deliver(self) -> None:
        """Pass the output on now. Never raises."""


class Deliveries:
    """The requests whose clients get output in the next delivery."""

    def __init__(self) -> None:
        self._due: list[Recipient] = []
        self._resumes_at = 0.0
        """Monotonic time before which there is no delivery."""

    def add(self, recipient: Recipient) -> None:
        """Deliver the output of ``recipient`` in the next delivery."""
        self._due.append(recipient)
        if len(self._due) > 1:
            return
        loop = asyncio.get_running_loop()
        pause_s = self._resumes_at - time.monotonic()
        if pause_s < _SHORT_S:
            loop.call_soon(self._deliver)
        else:
            loop.call_later(pause_s, self._deliver)

    def _deliver(self) -> None:
        due, self._due = self._due, []
        begun = time.monotonic()
        for recipient in due:
            recipient.deliver()
        ended = time.monotonic()
        self._resumes_at = ended + min(ended - begun, MAX_PAUSE_S)
