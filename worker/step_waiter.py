"""Waits for the ends of steps that were started, while the engine thread starts the next."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from engine.plan import StepPlan, StepResult
from engine.runner import Ending

log = logging.getLogger(__name__)

Done = Callable[[StepPlan, StepResult | Exception], None]


class StepWaiter:
    """A thread that reports steps in the order in which they were started."""

    def __init__(self, done: Done) -> None:
        """``done`` is called on this thread: it must only hand over."""
        self._done = done
        self._endings: queue.SimpleQueue[tuple[StepPlan, Ending] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step-waiter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: StepPlan, ending: Ending) -> None:
        """Report this step once it has ended. Never blocks."""
        self._endings.put((plan, ending))

    def stop(self, timeout_s: float) -> None:
        """End after the steps that were started. Blocks up to ``timeout_s`` seconds."""
        self._endings.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (started := self._endings.get()) is not None:
            plan, ending = started
            try:
                result: StepResult | Exception = ending()
            except Exception as error:
                log.exception("engine step %d failed", plan.step)
                result = error
            self._done(plan, result)
