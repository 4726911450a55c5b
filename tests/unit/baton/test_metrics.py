"""Every metric is named as promised, carries its unit, and has bounded labels."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from baton.metrics import RouterMetrics, WorkerMetrics

ROUTER = {
    "baton_time_to_first_token_seconds": ("class",),
    "baton_time_per_output_token_seconds": ("class",),
    "baton_inter_token_latency_seconds": ("class",),
    "baton_request_latency_seconds": ("class",),
    "baton_requests": ("class", "outcome", "code"),
    "baton_goodput_requests": ("class",),
    "baton_prompt_tokens": ("class",),
    "baton_cached_prompt_tokens": ("class",),
    "baton_generated_tokens": ("class",),
    "baton_route_decisions": ("decision", "reason"),
    "baton_queue_seconds": ("role",),
    "baton_waiting_requests": ("tenant",),
    "baton_prefill_drain_tokens_per_second": (),
    "baton_rate_limit_failures": (),
}
WORKER = {
    "baton_sequences": ("worker", "role", "state"),
    "baton_kv_blocks": ("worker", "role", "state"),
    "baton_batch_fill_ratio": ("worker", "role"),
    "baton_computed_prompt_tokens": ("worker", "role"),
    "baton_queue_seconds": ("role",),
    "baton_handoffs": ("transport", "outcome"),
    "baton_handoff_seconds": ("transport",),
    "baton_handoff_bytes": ("transport",),
}


def series_of(metrics: RouterMetrics | WorkerMetrics) -> dict[str, MetricWrapperBase]:
    found = [value for value in vars(metrics).values() if isinstance(value, MetricWrapperBase)]
    return {metric._name: metric for metric in found}


@pytest.mark.parametrize(
    ("kind", "promised"),
    [(RouterMetrics, ROUTER), (WorkerMetrics, WORKER)],
    ids=["router", "worker"],
)
def test_the_promised_series_exist(
    kind: type[RouterMetrics] | type[WorkerMetrics], promised: dict[str, tuple[str, ...]]
) -> None:
    series = series_of(kind(CollectorRegistry()))
    for name, labels in promised.items():
        assert tuple(series[name]._labelnames) == labels, name
    for name, metric in series.items():
        assert name.startswith("baton_")
        assert metric._documentation.endswith("."), name


def test_router_and_worker_share_one_name() -> None:
    """One page shows both; that of queues has the role in its label."""
    router = set(series_of(RouterMetrics(CollectorRegistry())))
    worker = set(series_of(WorkerMetrics(CollectorRegistry())))
    assert router & worker == {"baton_queue_seconds"}
