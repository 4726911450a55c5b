"""The engine thread and steps that fail: what it reports, and when it ends the process."""

from __future__ import annotations

import gc
import logging
import queue
import threading
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from engine.execution.runner import Ending
from engine.scheduling.plan import StepPlan, StepResult
from worker.core.engine_thread import EngineThread

WAIT_S = 60.0
GPU = torch.device("cuda:1")
FAULT = RuntimeError("CUDA error: an illegal memory access was encountered\nAdvice.")
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
Work = Callable[[], None]


class FakeCuda:
    """What threads ask of ``torch.cuda``."""

    def __init__(self) -> None:
        self.set_by: list[str] = []
        """Names of threads, as they have set their device."""
        self.waited = 0
        self.error: Exception | None = None

    def set_device(self, device: int) -> None:
        assert device == GPU.index
        self.set_by.append(threading.current_thread().name)

    def current_stream(self, device: torch.device) -> Any:
        assert device == GPU
        return SimpleNamespace(synchronize=self._synchronize)

    def _synchronize(self) -> None:
        self.waited += 1
        if self.error is not None:
            raise self.error


class Runner:
    """Steps fail as the test says; by their numbers, as they begin or as they end."""

    def __init__(self, device: torch.device, *, overlaps: bool) -> None:
        self.device, self.overlaps = device, overlaps
        self.layers_done = 0
        self.begins: dict[int, Work] = {}
        self.ends: dict[int, Work] = {}

    def clear_progress(self) -> None:
        """Nothing to do."""

    def run(self, plan: StepPlan) -> StepResult:
        return self.start(plan)()

    def start(self, plan: StepPlan) -> Ending:
        self.begins.get(plan.step, lambda: None)()

        def ending() -> StepResult:
            self.ends.get(plan.step, lambda: None)()
            return StepResult(plan.step, (), 0.0)

        return ending


class Bench:
    """An engine thread, what it reports, and why it would have ended the process."""

    def __init__(self, device: torch.device = GPU, *, overlaps: bool = True) -> None:
        self.runner = Runner(device, overlaps=overlaps)
        self.reports: queue.SimpleQueue[tuple[int, StepResult | Exception]] = queue.SimpleQueue()
        self.reasons: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        """Each with the name of the thread that gave it."""
        self.thread = EngineThread(
            self.runner,  # type: ignore[arg-type]
            lambda plan, result: self.reports.put((plan.step, result)),
            fail=lambda reason: self.reasons.put((reason, threading.current_thread().name)),
        )
        self.thread.start()

    def run(self, step: int) -> StepResult | Exception:
        """One step's report."""
        self.thread.submit(StepPlan(step, (), (), ()))
        found, result = self.reports.get(timeout=WAIT_S)
        assert found == step
        return result


def raising(error: Exception) -> Work:
    def work() -> None:
        raise error

    return work


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch, "cuda", fake)
    return fake


def test_each_of_its_threads_sets_its_device_first(cuda: FakeCuda) -> None:
    bench = Bench()
    bench.run(1)
    assert sorted(cuda.set_by) == ["engine", "step-waiter"]
    bench.thread.stop(WAIT_S)


@pytest.mark.parametrize("when", ["begins", "ends"])
def test_a_lost_device_ends_the_process_before_anything_else(cuda: FakeCuda, when: str) -> None:
    """On the thread that sees it; nothing is waited for, and no callback comes first."""
    bench = Bench()
    getattr(bench.runner, when)[1] = raising(FAULT)
    bench.run(1)
    reason, thread = bench.reasons.get_nowait()
    assert reason == (
        "its device is lost: RuntimeError: CUDA error: an illegal memory access was encountered"
    )
    assert thread == ("engine" if when == "begins" else "step-waiter")
    assert cuda.waited == 0
    bench.thread.stop(WAIT_S)


@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("when", ["begins", "ends"])
def test_a_lack_of_memory_is_outlived(cuda: FakeCuda, when: str, overlaps: bool) -> None:
    """What the step has launched has ended before its failure is reported."""
    bench = Bench(overlaps=overlaps)
    getattr(bench.runner, when)[1] = raising(NO_MEMORY)
    assert bench.run(1) is NO_MEMORY
    assert cuda.waited == 1
    assert isinstance(bench.run(2), StepResult)
    assert bench.reasons.empty()
    bench.thread.stop(WAIT_S)


@pytest.mark.parametrize("error", [NO_MEMORY, KeyError("whatever")])
def test_any_error_after_which_the_device_does_not_answer(cuda: FakeCuda, error: Exception) -> None:
    bench = Bench()
    bench.runner.begins[1] = raising(error)
    cuda.error = FAULT
    bench.run(1)
    reason, _ = bench.reasons.get_nowait()
    assert "an illegal memory access" in reason
    bench.thread.stop(WAIT_S)


def test_a_reported_error_keeps_no_tensors_of_its_step(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    # pytest keeps what is logged, and so the frames.
    monkeypatch.setattr(logging.getLogger("worker.core.engine_thread"), "disabled", True)
    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = torch.zeros(8)
        held.append(weakref.ref(activations))
        raise NO_MEMORY

    bench = Bench()
    bench.runner.begins[1] = step
    bench.runner.ends[2] = step
    reports = [bench.run(1), bench.run(2)]
    assert reports == [NO_MEMORY, NO_MEMORY]
    gc.collect()
    assert [each() for each in held] == [None, None]
    bench.thread.stop(WAIT_S)


def test_on_a_cpu_no_device_is_asked(cuda: FakeCuda) -> None:
    bench = Bench(torch.device("cpu"), overlaps=False)
    bench.runner.begins[1] = raising(KeyError("whatever"))
    assert isinstance(bench.run(1), KeyError)
    assert isinstance(bench.run(2), StepResult)
    assert (cuda.waited, cuda.set_by) == (0, [])
    bench.thread.stop(WAIT_S)
