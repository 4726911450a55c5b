"""A thread that lives as long as the process and makes blocking calls, one after the other."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


class DaemonThread:
    """Makes blocking calls on a thread of its own.

    Unlike an executor's thread, it lets the process end while a call hangs.
    """

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def call(self, function: Callable[[], Result]) -> asyncio.Future[Result]:
        """Call ``function`` on the thread. Return a future with its result or exception.

        If the future is cancelled, the call continues in the thread.
        """
        loop = asyncio.get_running_loop()
        outcome: asyncio.Future[Result] = loop.create_future()

        def settle(result: Result | None, error: BaseException | None) -> None:
            if outcome.done():
                return
            if error is not None:
                outcome.set_exception(error)
            else:
                outcome.set_result(result)  # type: ignore[arg-type]

        def run() -> None:
            result, failure = None, None
            try:
                result = function()
            except BaseException as error:
                failure = error
            with contextlib.suppress(RuntimeError):  # the loop is closed by now
                loop.call_soon_threadsafe(settle, result, failure)

        self._calls.put(run)
        return outcome

    def _work(self) -> None:
        while True:
            self._calls.get()()
