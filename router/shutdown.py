"""Ends a router process, either gracefully or immediately. Owned by the event loop.

serving ─SIGTERM→ draining ─idle, the deadline, another signal→ ended serving ─SIGINT→ ended

`baton drain` sends SIGTERM to a router, so each signal is in the audit log."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Coroutine
from typing import Any

from baton.host.background import end_tasks
from router.access.audit import note_signal


class Shutdown:
    """The shutdown of a router process: whether it was requested, and whether it is immediate."""

    def __init__(self, name: str) -> None:
        """Create the shutdown of a router. ``name``: the router's name in the audit log, as in
        `baton drain`.
        """
        self._name = name
        self.requested = asyncio.Event()
        self.at_once = asyncio.Event()

    @property
    def in_order(self) -> bool:
        """Whether a graceful shutdown was requested, which lets running requests end."""
        return self.requested.is_set() and not self.at_once.is_set()

    def take_signals(self) -> None:
        """Handle SIGTERM and SIGINT from now on."""
        loop = asyncio.get_running_loop()
        loop.add_signal_handler(signal.SIGTERM, self._on_term)
        loop.add_signal_handler(signal.SIGINT, self._on_interrupt)

    def _on_term(self) -> None:
        note_signal(self._name, "stop" if self.requested.is_set() else "drain", signal.SIGTERM)
        if self.requested.is_set():
            self.at_once.set()
        self.requested.set()

    def _on_interrupt(self) -> None:
        note_signal(self._name, "stop", signal.SIGINT)
        self.at_once.set()
        self.requested.set()

    async def until(self, done: Coroutine[Any, Any, None], deadline_s: float) -> None:
        """Wait until ``done`` has ended, ``deadline_s`` seconds have passed, or an immediate
        shutdown is requested.
        """
        waits = [asyncio.create_task(done), asyncio.create_task(self.at_once.wait())]
        await asyncio.wait(waits, timeout=deadline_s, return_when=asyncio.FIRST_COMPLETED)
        await end_tasks(waits)
