"""Every metric is named as promised, carries its unit, and has bounded labels."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.metrics import MetricWrapperBase

from baton.telemetry.metrics import SHARED_FOLDER_VARIABLE, RouterMetrics
from baton.telemetry.worker_metrics import WorkerMetrics

ROUTER = {
    "baton_time_to_first_token_seconds": ("class",),
    "baton_ttft_part_seconds": ("class", "part"),
    "baton_second_token_part_seconds": ("class", "part"),
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
    "baton_grammar_compile_seconds": ("role",),
    "baton_waiting_requests": ("tenant",),
    "baton_prefill_speed_workers": (),
    "baton_rate_limit_failures": (),
    "baton_slo_violations": ("class", "slo"),
    "baton_prefix_lookups": ("outcome",),
    "baton_prefix_blocks": ("result",),
    "baton_registry_age_seconds": (),
    "baton_needed_workers": ("role",),
    "baton_event_loop_lag_seconds": ("role",),
    "baton_redis_call_seconds": ("role", "call"),
    "baton_redis_failures": ("role", "call"),
}
WORKER = {
    "baton_sequences": ("worker", "role", "state"),
    "baton_kv_blocks": ("worker", "role", "state"),
    "baton_batch_fill_ratio": ("worker", "role"),
    "baton_computed_prompt_tokens": ("worker", "role"),
    "baton_queue_seconds": ("role",),
    "baton_grammar_compile_seconds": ("role",),
    "baton_handoffs": ("transport", "outcome"),
    "baton_handoff_seconds": ("transport",),
    "baton_handoff_bytes": ("transport",),
    "baton_handoff_exposed_seconds": ("transport",),
    "baton_model_flops_utilization": ("worker", "role"),
    "baton_model_bandwidth_utilization": ("worker", "role"),
    "baton_index_lag_seconds": ("worker", "role"),
    "baton_event_loop_lag_seconds": ("role",),
    "baton_redis_call_seconds": ("role", "call"),
    "baton_redis_failures": ("role", "call"),
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
    """One page shows both; those that both have carry the role in a label."""
    router = set(series_of(RouterMetrics(CollectorRegistry())))
    worker = set(series_of(WorkerMetrics(CollectorRegistry())))
    assert router & worker == {
        "baton_queue_seconds",
        "baton_grammar_compile_seconds",
        "baton_event_loop_lag_seconds",
        "baton_redis_call_seconds",
        "baton_redis_failures",
        "baton_certificate_expiry_timestamp_seconds",
    }


COUNT = """
import sys
from prometheus_client import CollectorRegistry, generate_latest
from baton.telemetry.metrics import RouterMetrics
metrics = RouterMetrics(CollectorRegistry())
metrics.requests.labels("short", "ok", "").inc(int(sys.argv[1]))
metrics.time_to_first_token.labels("short").observe(0.02)
metrics.active_requests.inc(2)
metrics.prefill_speed.set(int(sys.argv[1]))
metrics.routable_workers.labels("decode").set(int(sys.argv[1]))
if sys.argv[2:]:
    from prometheus_client.multiprocess import mark_process_dead
    mark_process_dead(int(sys.argv[2]), sys.argv[3])
    print(generate_latest(metrics.shown()).decode())
"""


def test_processes_that_share_a_folder_show_their_sums(tmp_path: Path) -> None:
    """Also what a process has counted that is gone; but its gauges are gone with it."""
    environment = {**os.environ, SHARED_FOLDER_VARIABLE: str(tmp_path)}

    def run(*arguments: str) -> tuple[int, str]:
        process = subprocess.Popen(
            [sys.executable, "-c", COUNT, *arguments], env=environment, stdout=subprocess.PIPE
        )
        output, _ = process.communicate(timeout=60)
        assert process.returncode == 0
        return process.pid, output.decode()

    gone, _ = run("3")
    run("5")
    # Another one has just begun.
    (tmp_path / "counter_1.db").touch()
    _, page = run("5", str(gone), str(tmp_path))
    assert 'baton_requests_total{class="short",code="",outcome="ok"} 13.0' in page
    assert 'baton_time_to_first_token_seconds_bucket{class="short",le="0.025"} 3.0' in page
    assert 'baton_time_to_first_token_seconds_count{class="short"} 3.0' in page
    assert "baton_active_requests 4.0" in page
    assert "baton_prefill_speed_workers 10.0" in page
    assert 'baton_routable_workers{role="decode"} 5.0' in page


def test_a_process_alone_shows_its_own() -> None:
    metrics = RouterMetrics(CollectorRegistry())
    assert metrics.shown() is metrics.registry


def test_a_percentile_is_above_its_slo_only_if_requests_missed_it() -> None:
    """So a bucket ends there, once."""
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry, ttft_slos_s=[5.0, 2.0, 5.0], tpot_slos_s=[0.08])
    metrics.time_to_first_token.labels("long").observe(5.0)
    metrics.time_per_output_token.labels("long").observe(0.081)
    for name, bound, expected in (
        ("time_to_first_token_seconds", "4.0", 0),
        ("time_to_first_token_seconds", "5.0", 1),
        ("time_per_output_token_seconds", "0.08", 0),
        ("time_per_output_token_seconds", "0.1", 1),
    ):
        labels = {"class": "long", "le": bound}
        assert registry.get_sample_value(f"baton_{name}_bucket", labels) == expected


FULL = """
import resource, signal
from prometheus_client import CollectorRegistry
from baton.telemetry.metrics import RouterMetrics
metrics = RouterMetrics(CollectorRegistry())
metrics.of_class("first")
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (0, resource.RLIM_INFINITY))
for number in range(100):
    metrics.of_class(f"class-{number}")
print("counted")
"""


def test_new_series_need_no_space_on_the_disk(tmp_path: Path) -> None:
    environment = {**os.environ, SHARED_FOLDER_VARIABLE: str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", FULL],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.stdout == "counted\n", done.stderr
