"""What steps did, over what the device does at most."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.checkpoint.model_config import ModelConfig, load_model_config
from engine.roofline import Ceilings, Storage, step_work, total
from engine.scheduling.plan import PlanRow, StepPlan
from tests.support.models import make_tiny_model
from worker.core.step_meter import StepMeter

STORAGE = Storage(weight_bytes=2.0, head_weight_bytes=2.0, kv_token_bytes=128.0)
CEILINGS = Ceilings(bytes_per_s=1e9, operations_per_s=4e9)
PROMPT = StepPlan(1, (), (), (PlanRow(0, 0, 20, (), True),))
DECODE = StepPlan(2, (), (), (PlanRow(0, 20, 1, (), True), PlanRow(1, 7, 1, (), True)))


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_model_config(make_tiny_model(tmp_path_factory.mktemp("model")))


def test_steps_since_the_last_call(config: ModelConfig) -> None:
    meter = StepMeter(config, STORAGE, CEILINGS)
    done = total([meter.observe(PROMPT, 0.25), meter.observe(DECODE, 0.75)])
    assert done == total(step_work(config, STORAGE, plan.rows) for plan in (PROMPT, DECODE))
    assert meter.take() == pytest.approx((done.operations / 4e9, done.bytes / 1e9))
    again = meter.observe(DECODE, 0.5)
    assert meter.take() == pytest.approx((again.operations / 2e9, again.bytes / 0.5e9))


def test_nothing_ran(config: ModelConfig) -> None:
    meter = StepMeter(config, STORAGE, CEILINGS)
    assert meter.take() == (0.0, 0.0)
    meter.observe(PROMPT, 1.0)
    meter.take()
    assert meter.take() == (0.0, 0.0)


def test_no_peak_is_known(config: ModelConfig) -> None:
    meter = StepMeter(config, STORAGE, None)
    assert meter.observe(PROMPT, 1.0).operations > 0
    assert meter.take() is None


def test_layers_of_one_window_count_together(config: ModelConfig) -> None:
    """However the layers are ordered, and as if each was counted by itself."""
    rows = [PlanRow(0, 40, 3, (), True)]
    shapes = [replace(config, windows=windows) for windows in ((0, 0, 8, 8), (8, 0, 8, 0))]
    shapes = [replace(shape, layers=4) for shape in shapes]
    mixed, again = (step_work(shape, STORAGE, rows) for shape in shapes)
    assert mixed == again
    plain, small = (
        step_work(replace(config, layers=4, windows=(window,) * 4), STORAGE, rows)
        for window in (0, 8)
    )
    assert mixed.kv_bytes == (plain.kv_bytes + small.kv_bytes) / 2
    assert mixed.operations == (plain.operations + small.operations) / 2
