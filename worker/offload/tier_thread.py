"""A thread that copies blocks between tiers, one job after another.

    new ─start→ running ─stop→ stopping → ended

It is a daemon, because a disk that does not answer must not keep the process alive.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from worker.cores.core_board import give_way
from worker.device.device import use_device

Result = TypeVar("Result")


class TierThread:
    """Runs jobs on a thread of its own. All methods are called on the event loop; only the jobs run
    on the thread."""

    def __init__(self, name: str, device: torch.device, *, gives_way: bool) -> None:
        """``device`` is the device of the pool's blocks.

        ``gives_way``: true if the thread gets a lower priority than other threads on a busy CPU.
        """
        self._loop = asyncio.get_running_loop()
        self._device = device
        self._gives_way = gives_way
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, job: Callable[[], Result]) -> asyncio.Future[Result]:
        """Queue a job. The future gets the job's result or its exception."""
        future: asyncio.Future[Result] = self._loop.create_future()

        def run() -> None:
            try:
                result = job()
            except Exception as error:
                self._tell(_set_error, future, error)
            else:
                self._tell(_set_result, future, result)

        self._jobs.put(run)
        return future

    def stop(self, timeout_s: float) -> bool:
        """End the thread after the queued jobs. Blocks for up to ``timeout_s`` seconds.

        Returns whether the thread has ended.
        """
        self._jobs.put(None)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _run(self) -> None:
        use_device(self._device)
        if self._gives_way:
            give_way()
        while (job := self._jobs.get()) is not None:
            job()

    def _tell(self, done: Callable[..., None], *values: object) -> None:
        # If the loop was closed meanwhile, there is no receiver.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(done, *values)


def _set_result(future: asyncio.Future[Result], result: Result) -> None:
    if not future.done():
        future.set_result(result)


def _set_error(future: asyncio.Future[Result], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
