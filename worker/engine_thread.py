"""The engine thread: takes step plans, one after another, and returns their results."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from engine.plan import StepPlan, StepResult
from engine.runner import ModelRunner

log = logging.getLogger(__name__)

Done = Callable[[StepPlan, StepResult | Exception], None]


class EngineThread:
    """Owns the runner. ``done`` is called on the engine thread: it must only hand over."""

    def __init__(self, runner: ModelRunner, done: Done) -> None:
        self._runner = runner
        self._done = done
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: StepPlan) -> None:
        """Queue a step. Never blocks."""
        self._plans.put(plan)

    def stop(self, timeout_s: float) -> None:
        """End after the steps that are queued. Blocks up to ``timeout_s`` seconds."""
        self._plans.put(None)
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while (plan := self._plans.get()) is not None:
            try:
                result: StepResult | Exception = self._runner.run(plan)
            except Exception as error:
                log.exception("engine step %d failed", plan.step)
                result = error
            self._done(plan, result)
