"""The calibration, on an engine whose steps take what the test says."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.build import build_engine
from engine.engine import Engine, EngineSettings, warm_up
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.sequence import SchedulerLimits
from tests.support.models import make_tiny_model
from worker.costs import calibration
from worker.costs.calibration import alone, calibrate
from worker.costs.step_costs import StepCosts

COSTS = StepCosts((6.0, 0.25, 0.0001), (4.0, 0.75, 0.0005))


class Runner:
    """Takes the time that ``COSTS`` say; its first step of a shape takes longer."""

    def __init__(self, factor: float = 1.0) -> None:
        self.known: set[int] = set()
        self.plans: list[StepPlan] = []
        self.factor = factor
        self.now = 0.0

    def run(self, plan: StepPlan) -> StepResult:
        for new in plan.new:
            assert new.sequence_id not in self.known
            self.known.add(new.sequence_id)
        assert {row.sequence_id for row in plan.rows} == self.known
        self.plans.append(plan)
        if plan.decodes_only:
            ms = COSTS.step_ms(len(plan.rows), sum(row.start + 1 for row in plan.rows))
            tokens: tuple[int, ...] = (0,)
        else:
            (row,) = plan.rows
            ms = COSTS.prefill[0] + COSTS.chunk_ms(row.count, row.start)
            tokens = ()
        ms *= self.factor * (3.0 if plan.new else 1.0)
        self.now += ms / 1e3
        return StepResult(0, tuple(tokens for _ in plan.rows), ms / 1e3)

    def forget(self, sequence_id: int) -> None:
        self.known.remove(sequence_id)


def make_engine(
    runner: Runner, blocks: int = 4096, context: int = 8192, sequences: int = 64
) -> Engine:
    limits = SchedulerLimits(16, 512, sequences, context, 1 << 19)
    engine = SimpleNamespace(
        pool=BlockPool(blocks), scheduler=SimpleNamespace(limits=limits), runner=runner
    )
    return cast(Engine, engine)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch) -> Runner:
    """Whose steps move the calibration's clock."""
    made = Runner()
    monkeypatch.setattr(calibration, "time", SimpleNamespace(monotonic=lambda: made.now))
    return made


def test_the_costs_are_found_in_time_and_nothing_is_left(runner: Runner) -> None:
    engine = make_engine(runner)
    found = calibrate(engine, runner.run)
    assert found.prefill == pytest.approx(COSTS.prefill, rel=0.01, abs=1e-5)
    # A decode step's second run is one token longer than it is said to be.
    assert found.step == pytest.approx(COSTS.step, rel=0.02)
    # The first run of a shape takes three times as long here.
    assert runner.now <= 3 * 2 * calibration.BUDGET_S
    assert not runner.known
    counts = engine.pool.counts()
    assert (counts.free, counts.used, counts.cached) == (4096, 0, 0)
    assert engine.pool.held_hashes() == []
    engine.pool.check()


def test_a_slow_engine_runs_no_more_than_the_fewest_shapes(runner: Runner) -> None:
    runner.factor = 1000.0
    calibrate(make_engine(runner), runner.run)
    assert len(runner.plans) == 2 * 3 * 2


@pytest.mark.parametrize(
    ("blocks", "context", "sequences"), [(2, 32, 1), (8, 128, 4), (40, 600, 2)]
)
def test_a_small_engine_is_asked_for_nothing_that_it_has_not(
    runner: Runner, blocks: int, context: int, sequences: int
) -> None:
    found = calibrate(make_engine(runner, blocks, context, sequences), runner.run)
    for plan in runner.plans:
        assert len(plan.rows) <= sequences
        used = [block for row in plan.rows for block in row.block_table]
        assert len(used) == len(set(used)) <= blocks
        assert all(row.start + row.count <= len(row.block_table) * 16 for row in plan.rows)
    assert min(*found.prefill, *found.step) >= 0


def test_a_step_that_fails_leaves_no_block(runner: Runner) -> None:
    engine = make_engine(runner)

    def broken(plan: StepPlan) -> StepResult:
        raise RuntimeError("no memory")

    with pytest.raises(RuntimeError, match="no memory"):
        calibrate(engine, broken)
    assert engine.pool.counts().used == 0


def test_a_real_engine(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model")
    engine = build_engine(
        EngineSettings(model, "float32", device="cpu", kv_pool_bytes=8 << 20, threads=1)
    )
    warm_up(engine)
    found = calibrate(engine, engine.runner.run)
    assert found.step_ms(1, 32) > 0
    assert found.prefill[0] + found.chunk_ms(64, 0) > 0
    engine.pool.check()
    assert engine.pool.counts().used == engine.pool.counts().cached == 0
    assert engine.scheduler.is_idle()


def test_the_workers_of_a_host_measure_one_after_another(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    inside: list[int] = []
    most: list[int] = []

    def measure(number: int) -> None:
        with alone(path):
            inside.append(number)
            most.append(len(inside))
            threading.Event().wait(0.05)
            inside.remove(number)

    threads = [threading.Thread(target=measure, args=(n,)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert most == [1, 1, 1]


def test_who_measures_for_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(calibration, "LONGEST_WAIT_S", 0.05)
    done = threading.Event()

    def other() -> None:
        with alone(tmp_path / "lock"):
            done.set()

    with alone(tmp_path / "lock"):
        thread: Any = threading.Thread(target=other)
        thread.start()
        assert done.wait(20)
        thread.join(20)


def test_without_others_there_is_no_wait() -> None:
    with alone(None):
        pass
