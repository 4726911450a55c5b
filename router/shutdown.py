"""How a router process ends: in order, or at once. Owned by the event loop.

serving ─SIGTERM→ draining ─idle, the deadline, another signal→ ended
serving ─SIGINT→ ended

`baton drain` tells a router by SIGTERM, so the audit log has each signal.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from baton.host.background import end_tasks
from router.access.audit import note_signal


class Shutdown:
    """Which end the process was told to take."""

    def __init__(self, name: str) -> None:
        """``name`` of the router in the audit log, as `baton drain` calls it."""
        self._name = name
        self.told = asyncio.Event()
        self.at_once = asyncio.Event()

    @property
    def in_order(self) -> bool:
        """Whether what runs may end."""
        return self.told.is_set() and not self.at_once.is_set()

    def take_signals(self) -> None:
        """From now on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)

    def _on_term(self) -> None:
        note_signal(self._name, "stop" if self.told.is_set() else "drain", signal.SIGTERM)
        if self.told.is_set():
            self.at_once.set()
        self.told.set()

    def _on_interrupt(self) -> None:
        note_signal(self._name, "stop", signal.SIGINT)
        self.at_once.set()
        self.told.set()

    async def until(self, done: Coroutine[Any, Any, None], deadline_s: float) -> None:
        """Wait for it, for the deadline, or until the process is to end at once."""
        waits = [asyncio.create_task(done), asyncio.create_task(self.at_once.wait())]
        await asyncio.wait(waits, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        await end_tasks(waits)
