"""The engine thread: takes step plans, one after another, and returns their results."""

from __future__ import annotations

import logging
import os
import queue
import threading
from collections.abc import Callable

from engine.plan import StepPlan, StepResult
from engine.runner import ModelRunner
from worker.cores import CoreBoard

log = logging.getLogger(__name__)

Done = Callable[[StepPlan, StepResult | Exception], None]


class EngineThread:
    """Owns the runner. ``done`` is called on the engine thread: it must only hand over."""

    def __init__(
        self, runner: ModelRunner, done: Done, board: CoreBoard | None = None, niceness: int = 0
    ) -> None:
        """With a ``board``, each step takes as many threads as it says.

        ``niceness`` is added to that of the process, for this thread and those that compute for it.
        """
        self._runner = runner
        self._done = done
        self._board = board
        self._niceness = niceness
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
        if self._niceness:
            # Of this thread alone: Linux keeps it by thread, and threads that it starts inherit it.
            thread = threading.get_native_id()
            os.setpriority(
                os.PRIO_PROCESS, thread, os.getpriority(os.PRIO_PROCESS, thread) + self._niceness
            )
        while (plan := self._plans.get()) is not None:
            try:
                result: StepResult | Exception = self._step(plan)
            except Exception as error:
                log.exception("engine step %d failed", plan.step)
                result = error
            self._done(plan, result)

    def _step(self, plan: StepPlan) -> StepResult:
        if self._board is None:
            return self._runner.run(plan)
        self._runner.use_threads(self._board.begin(prefilling=not plan.decodes_only))
        try:
            return self._runner.run(plan)
        finally:
            self._board.end()
