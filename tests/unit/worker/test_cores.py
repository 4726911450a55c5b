from __future__ import annotations

import os
import threading
from pathlib import Path

import pytest

from engine.plan import StepPlan, StepResult
from worker import cores
from worker.cores import CoreBoard, threads_for
from worker.engine_thread import EngineThread


def test_a_lone_step_takes_every_core() -> None:
    assert threads_for(8, prefilling=True, others=0) == 8
    assert threads_for(8, prefilling=False, others=0) == 8


def test_decode_divides_the_cores_and_prefill_takes_what_is_left_by_priority() -> None:
    assert threads_for(2, prefilling=False, others=1) == 1
    assert threads_for(8, prefilling=False, others=1) == 4
    assert threads_for(2, prefilling=False, others=5) == 1
    assert threads_for(8, prefilling=True, others=5) == 8


def test_workers_see_each_other_on_the_board(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    prefill, decode = (CoreBoard(path, number, 2, 2) for number in range(2))
    assert decode.begin(prefilling=False) == 2
    decode.end()
    assert prefill.begin(prefilling=True) == 2
    assert decode.begin(prefilling=False) == 1
    prefill.end()
    assert decode.begin(prefilling=False) == 2


def test_what_a_dead_worker_left_does_not_count_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cores"
    CoreBoard(path, 0, 2, 2).begin(prefilling=True)
    board = CoreBoard(path, 1, 2, 2)
    assert board.begin(prefilling=False) == 1
    monkeypatch.setattr(cores, "_STALE_NS", 0)
    assert board.begin(prefilling=False) == 2


def test_a_board_may_grow(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    first = CoreBoard(path, 0, 1, 4)
    second = CoreBoard(path, 1, 2, 4)
    first.begin(prefilling=False)
    assert second.begin(prefilling=False) == 2


class _Runner:
    """Notes how it is run."""

    overlaps = False

    def __init__(self) -> None:
        self.threads: list[int] = []
        self.niceness: list[int] = []

    def use_threads(self, threads: int) -> None:
        self.threads.append(threads)

    def run(self, plan: StepPlan) -> StepResult:
        self.niceness.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))
        return StepResult(plan.step, (), 0.0)


def test_the_engine_thread_alone_is_nicer_and_asks_the_board(tmp_path: Path) -> None:
    runner, done = _Runner(), threading.Event()
    board = CoreBoard(tmp_path / "cores", 0, 1, 3)
    thread = EngineThread(runner, lambda _plan, _result: done.set(), board, niceness=1)  # type: ignore[arg-type]
    before = os.getpriority(os.PRIO_PROCESS, 0)
    thread.start()
    thread.submit(StepPlan(1, (), (), ()))
    assert done.wait(10)
    thread.stop(10)
    assert runner.threads == [3]
    assert runner.niceness == [before + 1]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
