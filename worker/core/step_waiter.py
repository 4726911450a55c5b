"""Waits for the ends of steps that were started, while the engine thread starts the next."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable

import torch

from engine.execution.runner import Ending
from engine.scheduling.plan import StepPlan, StepResult
from worker.device.device import use_device

Done = Callable[[StepPlan, StepResult | Exception], None]
Failed = Callable[[StepPlan, Exception], Exception]
"""Looks into a step's error, and gives what is to be reported."""


class StepWaiter:
    """A thread that reports steps in the order in which they were started."""

    def __init__(self, done: Done, failed: Failed, device: torch.device) -> None:
        """``done`` and ``failed`` are called on this thread: ``done`` must only hand over."""
        self._done = done
        self._failed = failed
        self._device = device
        self._endings: queue.SimpleQueue[tuple[StepPlan, Ending | Exception] | None]
        self._endings = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step-waiter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: StepPlan, ending: Ending | Exception) -> None:
        """Report this step once it has ended, or why it has not begun. Never blocks."""
        self._endings.put((plan, ending))

    def stop(self, timeout_s: float) -> None:
        """End after the steps that were started. Blocks up to ``timeout_s`` seconds."""
        self._endings.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        use_device(self._device)
        while (started := self._endings.get()) is not None:
            plan, ending = started
            self._done(plan, ending if isinstance(ending, Exception) else self._end(plan, ending))

    def _end(self, plan: StepPlan, ending: Ending) -> StepResult | Exception:
        try:
            return ending()
        except Exception as error:
            return self._failed(plan, error)
