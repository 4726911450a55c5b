"""What a worker shows of itself, and what it shows no longer in another role."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.telemetry.metrics import WorkerMetrics
from engine.roofline import Work
from worker.core.gauges import WorkerGauges

LABELS = {"worker": "w-0", "role": "prefill"}


def make(price: float = 0.0) -> tuple[WorkerMetrics, WorkerGauges]:
    metrics = WorkerMetrics(CollectorRegistry())
    return metrics, WorkerGauges(metrics, "w-0", "prefill", price)


def value(metrics: WorkerMetrics, name: str, **labels: str) -> float | None:
    return metrics.registry.get_sample_value(f"baton_{name}", labels or LABELS)


def test_work_and_utilization() -> None:
    metrics, gauges = make()
    assert value(metrics, "model_flops_utilization") is None, "no peak is known"
    gauges.worked(Work(3.0, 4.0, 10.0))
    gauges.worked(Work(3.0, 4.0, 10.0))
    gauges.utilization(0.5, 0.25)
    assert value(metrics, "model_memory_bytes_total") == 14.0
    assert value(metrics, "model_operations_total") == 20.0
    assert value(metrics, "model_flops_utilization") == 0.5
    assert value(metrics, "model_bandwidth_utilization") == 0.25


def test_the_index_and_the_loop() -> None:
    metrics, gauges = make()
    gauges.index_told(7, 0.5)
    gauges.loop_lag(0.01)
    assert value(metrics, "index_pending_blocks") == 7
    assert value(metrics, "index_lag_seconds") == 0.5
    assert value(metrics, "event_loop_lag_seconds_count", role="prefill") == 1


def test_a_price_is_shown_where_there_is_one() -> None:
    assert value(make()[0], "worker_price_per_hour") is None
    assert value(make(1.5)[0], "worker_price_per_hour") == 1.5


def test_another_role_shows_it_under_its_own_name() -> None:
    """What counts something stays: it happened."""
    for price, peak in ((0.0, False), (1.5, True)):
        metrics, gauges = make(price)
        gauges.worked(Work(3.0, 4.0, 10.0))
        if peak:
            gauges.utilization(0.5, 0.25)
        gauges.retire()
        left = {
            family.name
            for family in metrics.registry.collect()
            if family.type == "gauge" and not family.name.endswith("_created")
            for sample in family.samples
            if sample.labels.get("role") == "prefill"
        }
        assert left == set()
        assert value(metrics, "model_operations_total") == 10.0
