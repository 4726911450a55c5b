"""A worker's metrics, in one role and in the next, and how well its steps use the device."""

from __future__ import annotations

from dataclasses import replace

import pytest
from prometheus_client import CollectorRegistry

from baton.telemetry.worker_metrics import WorkerMetrics
from engine.checkpoint.model_config import ModelConfig, load_model_config
from engine.roofline import Ceilings, Storage, step_work, total
from engine.scheduling.plan import PlanRow, StepPlan, StepResult
from tests.support.models import make_tiny_model
from worker.core.gauges import UtilizationMeter, WorkerGauges

LABELS = {"worker": "w-0", "role": "prefill"}
STORAGE = Storage(weight_bytes=2.0, head_weight_bytes=2.0, kv_token_bytes=128.0)
CEILINGS = Ceilings(bytes_per_s=1e9, operations_per_s=4e9)
PROMPT = StepPlan(1, (), (), (PlanRow(0, 0, 20, (), True),))
DECODE = StepPlan(2, (), (), (PlanRow(0, 20, 1, (), True), PlanRow(1, 7, 1, (), True)))
RESULT = StepResult(1, ((7,),), 0.5)


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return load_model_config(make_tiny_model(tmp_path_factory.mktemp("model")))


def make(
    price: float = 0.0, meter: UtilizationMeter | None = None
) -> tuple[WorkerMetrics, WorkerGauges]:
    metrics = WorkerMetrics(CollectorRegistry())
    return metrics, WorkerGauges(metrics, "w-0", "prefill", price, meter)


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"baton_{name}", labels or LABELS)


def test_work_and_utilization_of_steps(config: ModelConfig) -> None:
    metrics, gauges = make(meter=UtilizationMeter(config, STORAGE, CEILINGS))
    gauges.step(PROMPT, RESULT, 20)
    gauges.step(DECODE, RESULT, 0)
    assert value(metrics, "model_flops_utilization") is None, "not shown yet"
    gauges.show_utilization()
    done = total(step_work(config, STORAGE, plan.rows) for plan in (PROMPT, DECODE))
    assert value(metrics, "computed_prompt_tokens_total") == 20
    assert value(metrics, "step_seconds_count") == 2
    assert value(metrics, "model_memory_bytes_total") == done.bytes
    assert value(metrics, "model_operations_total") == done.operations
    assert value(metrics, "model_flops_utilization") == pytest.approx(done.operations / 4e9)
    assert value(metrics, "model_bandwidth_utilization") == pytest.approx(done.bytes / 1e9)


def test_no_utilization_is_shown_without_peaks(config: ModelConfig) -> None:
    for meter in (None, UtilizationMeter(config, STORAGE, None)):
        metrics, gauges = make(meter=meter)
        gauges.step(PROMPT, RESULT, 20)
        gauges.show_utilization()
        assert value(metrics, "model_flops_utilization") is None


def test_the_index_and_the_loop() -> None:
    metrics, gauges = make()
    gauges.index_published(7, 0.5)
    gauges.loop_lag(0.01)
    assert value(metrics, "index_pending_blocks") == 7
    assert value(metrics, "index_lag_seconds") == 0.5
    assert value(metrics, "event_loop_lag_seconds_count", role="prefill") == 1


def test_a_price_is_shown_where_there_is_one() -> None:
    assert value(make()[0], "worker_price_per_hour") is None
    assert value(make(1.5)[0], "worker_price_per_hour") == 1.5


def test_another_role_shows_metrics_under_its_own_name(config: ModelConfig) -> None:
    """What counts something stays: it happened."""
    for price, ceilings in ((0.0, None), (1.5, CEILINGS)):
        metrics, gauges = make(price, UtilizationMeter(config, STORAGE, ceilings))
        gauges.step(PROMPT, RESULT, 20)
        gauges.show_utilization()
        gauges.change_role("decode")
        left = {
            family.name
            for family in metrics.registry.collect()
            if family.type == "gauge" and not family.name.endswith("_created")
            for sample in family.samples
            if sample.labels.get("role") == "prefill"
        }
        assert left == set()
        own = {"worker": "w-0", "role": "decode"}
        assert value(metrics, "worker_price_per_hour", **own) == (price or None)
        gauges.step(DECODE, RESULT, 0)
        assert value(metrics, "step_seconds_count") == 1
        assert value(metrics, "step_seconds_count", **own) == 1


def test_steps_since_the_last_call(config: ModelConfig) -> None:
    meter = UtilizationMeter(config, STORAGE, CEILINGS)
    done = total([meter.observe(PROMPT, 0.25), meter.observe(DECODE, 0.75)])
    assert done == total(step_work(config, STORAGE, plan.rows) for plan in (PROMPT, DECODE))
    assert meter.take() == pytest.approx((done.operations / 4e9, done.bytes / 1e9))
    again = meter.observe(DECODE, 0.5)
    assert meter.take() == pytest.approx((again.operations / 2e9, again.bytes / 0.5e9))


def test_nothing_ran(config: ModelConfig) -> None:
    meter = UtilizationMeter(config, STORAGE, CEILINGS)
    assert meter.take() == (0.0, 0.0)
    meter.observe(PROMPT, 1.0)
    meter.take()
    assert meter.take() == (0.0, 0.0)


def test_no_peak_is_known(config: ModelConfig) -> None:
    meter = UtilizationMeter(config, STORAGE, None)
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
