"""The engine thread: takes step plans, one after another, and returns their results.

A failed step is reported like a result, and the thread continues. If the device is lost, the
process ends at once, without waiting for the event loop, other threads or the device.
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
    """The thread that runs steps on the model runner.

    ``done`` receives each result on an engine thread, and must only pass it on.
    """

    def __init__(
        self, runner: ModelRunner, done: Done, board: CoreBoard | None = None, *, fail: Fail
    ) -> None:
        """Make the thread. With a ``board``, each step uses as many CPU threads as the board
        allows.

        ``fail`` ends the process. It is called on an engine thread when the device is lost.
        """
        self._runner = runner
        self._done = done
        self._fail = fail
        self._board = board
        self._running: StepPlan | None = None
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        # If the runner overlaps steps, another thread waits for their ends.
        self._waiter = StepWaiter(done, self._failed, runner.device) if runner.overlaps else None

    def start(self) -> None:
        self._thread.start()
        if self._waiter is not None:
            self._waiter.start()

    def submit(self, plan: StepPlan) -> None:
        """Queue a step; never blocks."""
        self._plans.put(plan)

    def stop(self, timeout_s: float) -> None:
        """End the thread after the queued steps. Blocks for up to ``timeout_s`` seconds."""
        deadline = time.monotonic() + timeout_s
        self._plans.put(None)
        self._thread.join(timeout_s)
        if self._waiter is not None:
            self._waiter.stop(max(0.0, deadline - time.monotonic()))

    def _run(self) -> None:
        try:
            self._take_plans()
        except BaseException as error:
            # Failed steps are caught elsewhere. This is, for example, an error in reporting one.
            self._fail(f"its engine thread has failed: {described(error)}")
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
        """Start a step. Returns a function that waits for the step's end, or the error that
        prevented the start."""
        try:
            return self._runner.start(plan)
        except Exception as error:
            return self._failed(plan, error)

    def _failed(self, plan: StepPlan, error: Exception) -> Exception:
        """Log a step's error, and end the process if the device is lost. Returns the error to
        report.

        Unless the error itself shows a lost device, this waits for all launched kernels. They may
        still write to blocks that the step's sequences release next. The wait fails if the device
        is lost.
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
        """The running step, and the number of layers whose KV the step has stored. None if no step
        runs.

        Any thread may read this property.
        """
        plan = self._running
        layers = self._runner.layers_done
        # If another step has begun meanwhile, the number belongs to that one.
        return (plan, layers) if plan is not None and plan is self._running else None

    def _step(self, plan: StepPlan) -> StepResult:
        self._runner.clear_progress()
        self._running = plan
        try:
            return run_sharing(self._runner, self._board, plan)
        finally:
            self._running = None


def run_sharing(runner: ModelRunner, board: CoreBoard | None, plan: StepPlan) -> StepResult:
    """Run a step on as many CPU threads as the board allows. Without a board, the runner's own
    number of threads is used."""
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
"""Examines a step's error, and returns the error to report for the step."""


class StepWaiter:
    """A thread that waits for started steps, and reports their results in the order of their
    start."""

    def __init__(self, done: Done, failed: Failed, device: torch.device) -> None:
        """``done`` receives results, and ``failed`` errors of steps. Both are called on this
        thread; ``done`` must only pass results on."""
        self._done = done
        self._failed = failed
        self._device = device
        self._endings: queue.SimpleQueue[tuple[StepPlan, Ending | Exception] | None]
        self._endings = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="step-waiter", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def submit(self, plan: StepPlan, ending: Ending | Exception) -> None:
        """Queue a started step, so that its result is reported. ``ending`` waits for the end of the
        step, or is the error that prevented its start."""
        self._endings.put((plan, ending))

    def stop(self, timeout_s: float) -> None:
        """End the thread after all started steps have ended. Blocks for up to ``timeout_s``
        seconds."""
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
