"""The engine thread with steps that overlap: each is started before the last one has ended."""

from __future__ import annotations

import queue
import threading

import pytest
import torch

from engine.execution.runner import Ending
from engine.scheduling.plan import StepPlan, StepResult
from worker.core.engine_thread import EngineThread

WAIT_S = 60.0


class OverlappingRunner:
    """Steps end when the test decides."""

    overlaps = True
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.started: queue.Queue[int] = queue.Queue()
        self.may_end = threading.Semaphore(0)

    def start(self, plan: StepPlan) -> Ending:
        self.started.put(plan.step)
        if plan.step < 0:
            raise RuntimeError(f"step {plan.step} cannot begin")

        def ending() -> StepResult:
            assert self.may_end.acquire(timeout=WAIT_S)
            if plan.step == 13:
                raise RuntimeError("the GPU is gone")
            return StepResult(plan.step, (), 0.0)

        return ending


Reports = queue.Queue[tuple[int, StepResult | Exception]]


def start_thread(runner: OverlappingRunner) -> tuple[EngineThread, Reports]:
    reports: Reports = queue.Queue()
    thread = EngineThread(
        runner,  # type: ignore[arg-type]
        lambda plan, result: reports.put((plan.step, result)),
        fail=pytest.fail,
    )
    thread.start()
    return thread, reports


def plan(step: int) -> StepPlan:
    return StepPlan(step, (), (), ())


def test_a_step_is_started_while_the_one_before_runs() -> None:
    runner = OverlappingRunner()
    thread, reports = start_thread(runner)
    thread.submit(plan(1))
    thread.submit(plan(2))
    assert [runner.started.get(timeout=WAIT_S) for _ in range(2)] == [1, 2]
    assert reports.empty()
    runner.may_end.release(2)
    assert [reports.get(timeout=WAIT_S)[0] for _ in range(2)] == [1, 2]
    thread.stop(WAIT_S)


@pytest.mark.parametrize("broken", [-1, 13])
def test_a_failed_step_is_reported_in_order(broken: int) -> None:
    """One that cannot begin does not overtake the one that runs."""
    runner = OverlappingRunner()
    thread, reports = start_thread(runner)
    for step in (1, broken, 3):
        thread.submit(plan(step))
    assert [runner.started.get(timeout=WAIT_S) for _ in range(3)] == [1, broken, 3]
    assert reports.empty()
    runner.may_end.release(3)
    found = [reports.get(timeout=WAIT_S) for _ in range(3)]
    assert [step for step, _ in found] == [1, broken, 3]
    assert [isinstance(result, RuntimeError) for _, result in found] == [False, True, False]
    thread.stop(WAIT_S)


def test_stopping_waits_for_what_was_started() -> None:
    runner = OverlappingRunner()
    thread, reports = start_thread(runner)
    thread.submit(plan(1))
    runner.may_end.release()
    thread.stop(WAIT_S)
    assert reports.get_nowait()[0] == 1
