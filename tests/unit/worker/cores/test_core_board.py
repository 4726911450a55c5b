from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest
import torch

from engine.cpu.library import CoreShare
from engine.scheduling.plan import StepPlan, StepResult
from worker.core.engine_thread import EngineThread
from worker.cores import core_board
from worker.cores.core_board import PAUSE, CoreBoard, pause_after, threads_for


def test_a_lone_step_takes_every_core() -> None:
    assert threads_for(8, yields=True, others=0) == 8
    assert threads_for(8, yields=False, others=0) == 8


def test_decode_divides_the_cores_and_prefill_takes_what_is_left() -> None:
    assert threads_for(2, yields=False, others=1) == 1
    assert threads_for(8, yields=False, others=1) == 4
    assert threads_for(2, yields=False, others=5) == 1
    assert threads_for(8, yields=True, others=5) == 8


def test_a_pause_is_a_part_of_the_step_and_never_long() -> None:
    assert pause_after(0.01) == pytest.approx(0.01)
    assert pause_after(60.0) == pytest.approx(0.1)


def test_workers_see_each_other_on_the_board(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    prefill = CoreBoard(path, 0, 2, 2, yields=True)
    decode = CoreBoard(path, 1, 2, 2, yields=False)
    assert decode.begin() == 2
    decode.end()
    assert prefill.begin() == 2
    assert decode.begin() == 1
    decode.end()
    prefill.end()
    assert decode.begin() == 2


def test_decode_pauses_for_prompts_that_have_waited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cores"
    prefill = CoreBoard(path, 0, 2, 2, yields=True)
    decode = CoreBoard(path, 1, 2, 2, yields=False)
    prefill.begin()
    decode.begin()
    time.sleep(0.05)
    decode.end()
    monkeypatch.setattr(core_board, "PATIENCE_S", 0.0)
    ended = time.monotonic()
    decode.begin()
    assert time.monotonic() - ended >= PAUSE * 0.05


def test_a_short_prompt_is_no_reason_to_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cores"
    prefill = CoreBoard(path, 0, 2, 2, yields=True)
    decode = CoreBoard(path, 1, 2, 2, yields=False)
    monkeypatch.setattr(core_board, "PATIENCE_S", 3600.0)
    monkeypatch.setattr(decode, "_sleep_until", pytest.fail)
    prefill.begin()
    decode.begin()
    decode.end()
    decode.begin()


def test_a_break_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps close to one another are one stretch of work; after a break another begins."""
    path = tmp_path / "cores"
    prefill = CoreBoard(path, 0, 2, 2, yields=True)
    monkeypatch.setattr(core_board, "BREAK_S", 3600.0)
    prefill._ended = time.monotonic()
    prefill._busy_since = 5.0
    prefill.begin()
    prefill.end()
    assert prefill._busy_since == 5.0
    monkeypatch.setattr(core_board, "BREAK_S", 0.0)
    prefill.begin()
    assert prefill._busy_since > 5.0


def test_what_a_dead_worker_left_does_not_count_for_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "cores"
    CoreBoard(path, 0, 2, 2, yields=True).begin()
    board = CoreBoard(path, 1, 2, 2, yields=False)
    assert board.begin() == 1
    monkeypatch.setattr(core_board, "_STALE_NS", 0)
    assert board.begin() == 2


def test_helpers_that_never_hand_in_are_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    prefill = CoreBoard(path, 0, 2, 2, yields=True)
    decode = CoreBoard(path, 1, 2, 2, yields=False)
    prefill.begin()
    with path.open("r+b") as file:
        file.seek(12)
        file.write((1).to_bytes(4, "little"))
    assert decode.begin() == 1


def test_a_restarted_worker_clears_its_line(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    CoreBoard(path, 0, 2, 2, yields=True).begin()
    CoreBoard(path, 0, 2, 2, yields=True)
    assert path.read_bytes()[:64] == bytes(64)


def test_a_board_may_grow(tmp_path: Path) -> None:
    path = tmp_path / "cores"
    first = CoreBoard(path, 0, 1, 4, yields=False)
    second = CoreBoard(path, 1, 2, 4, yields=False)
    first.begin()
    assert second.begin() == 2


class _Runner:
    """Notes how it is run."""

    overlaps = False
    layers_done = 0
    device = torch.device("cpu")

    def __init__(self) -> None:
        self.threads: list[int] = []

    def clear_progress(self) -> None:
        self.layers_done = 0

    def share_cores(self, share: CoreShare) -> None:
        self.share = share

    def use_threads(self, threads: int) -> None:
        self.threads.append(threads)

    def run(self, plan: StepPlan) -> StepResult:
        return StepResult(plan.step, (), 0.0)


def test_the_engine_thread_asks_the_board(tmp_path: Path) -> None:
    runner, done = _Runner(), threading.Event()
    board = CoreBoard(tmp_path / "cores", 0, 1, 3, yields=True)
    thread = EngineThread(
        runner,  # type: ignore[arg-type]
        lambda _plan, _result: done.set(),
        board,
        fail=pytest.fail,
    )
    thread.start()
    thread.submit(StepPlan(1, (), (), ()))
    assert done.wait(10)
    thread.stop(10)
    assert runner.threads == [3]
    assert runner.share == board.share
