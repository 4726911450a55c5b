"""The engine thread: takes step plans, one after another, and returns their results.

A failed step is reported like a result, and the thread goes on. Where the device is lost with it,
the process ends here and now: no event loop, no other thread and no device is waited for.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable

import torch

from baton.host.process_end import Fail
from engine.execution.runner import Ending, ModelRunner
from engine.scheduling.plan import StepPlan, StepResult
from worker.cores.core_board import CoreBoard, give_way
from worker.device.device import use_device, wait_for_steps
from worker.device.device_fault import described, is_device_fault, without_frames

log = logging.getLogger(__name__)


class EngineThread:
    """Owns the runner. ``done`` is called on a thread of the engine: it must only hand over."""

    def __init__(
        self, runner: ModelRunner, done: Done, board: CoreBoard | None = None, *, fail: Fail
    ) -> None:
        """With a ``board``, each step takes as many threads as it says.

        ``fail`` ends the process; it is called on a thread of the engine when the device is lost.
        """
        self._runner = runner
        self._done = done
        self._fail = fail
        self._board = board
        self._running: StepPlan | None = None
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # Steps that end while the next one is started are waited for by another thread.
        self._waiter = StepWaiter(done, self._failed, runner.device) if runner.overlaps else None

    def start(self) -> None:
        self._thread.start()
        if self._waiter is not None:
            self._waiter.start()

    def submit(self, plan: StepPlan) -> None:
        """Queue a step. Never blocks."""
        self._plans.put(plan)

    def stop(self, timeout_s: float) -> None:
        """End after the steps that are queued. Blocks up to ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        self._plans.put(None)
        self._thread.join(timeout_s)
        if self._waiter is not None:
            self._waiter.stop(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            self._take_plans()
        except BaseException as error:
            # Steps that fail end up elsewhere: this is an error in reporting one, for example.
            self._fail(f"its engine thread cannot go on: {described(error)}")
            raise

    def _take_plans(self) -> None:
        use_device(self._runner.device)
        if self._board is not None:
            give_way()
        while (plan := self._plans.get()) is not None:
            if self._waiter is not None:
                self._waiter.submit(plan, self._begun(plan))
                continue
            try:
                result: StepResult | Exception = self._step(plan)
            except Exception as error:
                result = self._failed(plan, error)
            self._done(plan, result)

    def _begun(self, plan: StepPlan) -> Ending | Exception:
        """A step's ending, or why it could not begin."""
        try:
            return self._runner.start(plan)
        except Exception as error:
            return self._failed(plan, error)

    def _failed(self, plan: StepPlan, error: Exception) -> Exception:
        """Report a step's error, and end the process where the device is lost.

        Nothing is waited for where the error itself tells so. After another one all that was
        launched is waited for: the step's kernels may still write to blocks that its sequences give
        back now, and a device that is lost says so.
        """
        log.error("engine step %d failed", plan.step, exc_info=error)
        fault = error if is_device_fault(error) else None
        if fault is None:
            try:
                wait_for_steps(self._runner.device)
            except Exception as after:
                fault = after
        if fault is not None:
            self._fail(f"its device is lost: {described(fault)}")
        return without_frames(error)

    def progress(self) -> tuple[StepPlan, int] | None:
        """The step that runs, and its layers that have stored their KV. Any thread may ask."""
        plan = self._running
        layers = self._runner.layers_done
        # Another step may have begun meanwhile: then the number is that one's.
        return (plan, layers) if plan is not None and plan is self._running else None

    def _step(self, plan: StepPlan) -> StepResult:
        self._runner.clear_progress()
        self._running = plan
        try:
            return run_sharing(self._runner, self._board, plan)
        finally:
            self._running = None


def run_sharing(runner: ModelRunner, board: CoreBoard | None, plan: StepPlan) -> StepResult:
    """Run a step on as many threads as the board says, if there is one."""
    if board is None:
        return runner.run(plan)
    runner.share_cores(board.share)
    runner.use_threads(board.begin())
    try:
        return runner.run(plan)
    finally:
        board.end()


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
