"""A simulated operating-system process: an event loop that can be frozen and killed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from tests.unit.handoff_model.virtual_time import VirtualLoop, VirtualTime

MAX_CANCELLATIONS = 200


class Process:
    """Runs until it is killed. ``name`` is its incarnation."""

    def __init__(self, name: str, time: VirtualTime) -> None:
        self.name = name
        self.time = time
        self.loop = VirtualLoop(time)  # type: ignore[abstract]
        self.is_alive = True
        self.awake_since = time.now
        time.loops.append(self.loop)

    @property
    def is_frozen(self) -> bool:
        return self.loop.is_frozen

    def freeze(self) -> None:
        """Execute nothing, as after SIGSTOP."""
        self.loop.is_frozen = True

    def wake(self) -> None:
        """Go on, as after SIGCONT."""
        if self.is_frozen:
            self.awake_since = self.time.now
        self.loop.is_frozen = False

    def die(self) -> None:
        """Execute nothing ever again."""
        self.is_alive = False
        self.time.loops.remove(self.loop)

    def soon(self, call: Callable[..., Any], *args: Any) -> None:
        """Notify the process; a dead one receives nothing."""
        if self.is_alive:
            self.loop.call_soon(call, *args)

    def start(self, work: Any, name: str) -> asyncio.Task[Any]:
        """Run a coroutine in it."""
        return self.loop.create_task(work, name=name)

    def bury(self) -> None:
        """End what a process was doing when it ended, so that nothing of it outlives the test."""
        self.loop.is_frozen = False
        for _ in range(MAX_CANCELLATIONS):
            if not self.loop.tasks:
                return
            for task in list(self.loop.tasks):
                task.cancel()
            self.loop.run_ready()
            self.time.now += 0.01
        raise AssertionError(f"{self.name}: tasks do not end: {self.loop.tasks}")
