"""Series under vLLM's names show what Baton's show."""

from __future__ import annotations

import pytest
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.exposition import choose_encoder
from prometheus_client.parser import text_string_to_metric_families

from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.page import MetricsPage
from baton.telemetry.worker_metrics import WorkerMetrics
from router.admin.cluster_metrics import merge_pages

NAMES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:prompt_tokens": "counter",
    "vllm:generation_tokens": "counter",
    "vllm:prefix_cache_queries": "counter",
    "vllm:prefix_cache_hits": "counter",
    "vllm:request_success": "counter",
}
CLUSTER = {"cluster": "blue", "model_name": "tiny"}
WORKER = CLUSTER | {"worker": "decode-0", "role": "decode"}
CLASS = CLUSTER | {"class": "short"}


def page_of(metrics: RouterMetrics | WorkerMetrics, *, vllm: bool = True) -> MetricsPage:
    return MetricsPage(metrics.registry, "blue", "tiny", lambda: None, vllm=vllm)


@pytest.fixture
def worker() -> WorkerMetrics:
    metrics = WorkerMetrics(CollectorRegistry())
    for slot, running in (("decode-0", 3), ("decode-1", 5)):
        metrics.sequences.labels(slot, "decode", "running").set(running)
        metrics.sequences.labels(slot, "decode", "waiting").set(1)
        for state, blocks in (("free", 50), ("cached", 20), ("used", 25), ("quarantined", 5)):
            metrics.kv_blocks.labels(slot, "decode", state).set(blocks)
        metrics.preemptions.labels(slot, "decode").inc(2)
    return metrics


@pytest.fixture
def router() -> RouterMetrics:
    metrics = RouterMetrics(CollectorRegistry())
    series = metrics.of_class("short")
    series.time_to_first_token.observe(0.3)
    series.inter_token_latency.observe(0.02)
    series.time_per_output_token.observe(0.04)
    series.request_latency.observe(3.0)
    series.prompt_tokens.inc(100)
    series.cached_prompt_tokens.inc(64)
    series.generated_tokens.inc(7)
    for outcome, code, times in (
        ("ok", "", 6),
        ("aborted", "", 2),
        ("error", "worker_failed", 1),
        ("error", "internal_error", 3),
        ("shed", "overloaded", 9),
    ):
        metrics.requests.labels("short", outcome, code).inc(times)
    return metrics


def test_gauges_and_counters_of_workers(worker: WorkerMetrics) -> None:
    value = page_of(worker).get_sample_value
    assert value("vllm:num_requests_running", WORKER) == 3
    assert value("vllm:num_requests_running", WORKER | {"worker": "decode-1"}) == 5
    assert value("vllm:num_requests_waiting", WORKER) == 1
    assert value("vllm:kv_cache_usage_perc", WORKER) == 0.3
    assert value("vllm:num_preemptions_total", WORKER) == 2


def test_tokens_latencies_and_requests_of_routers(router: RouterMetrics) -> None:
    value = page_of(router).get_sample_value
    assert value("vllm:prompt_tokens_total", CLASS) == 100
    assert value("vllm:prefix_cache_queries_total", CLASS) == 100
    assert value("vllm:prefix_cache_hits_total", CLASS) == 64
    assert value("vllm:generation_tokens_total", CLASS) == 7
    for name, seconds in (
        ("time_to_first_token", 0.3),
        ("inter_token_latency", 0.02),
        ("request_time_per_output_token", 0.04),
        ("e2e_request_latency", 3.0),
    ):
        assert value(f"vllm:{name}_seconds_sum", CLASS) == seconds
        assert value(f"vllm:{name}_seconds_bucket", CLASS | {"le": "+Inf"}) == 1
    for reason, times in (("stop", 6), ("abort", 2), ("error", 4)):
        labels = CLASS | {"finished_reason": reason}
        assert value("vllm:request_success_total", labels) == times


@pytest.mark.parametrize("accept", ["text/plain", "application/openmetrics-text; version=1.0.0"])
def test_both_formats_have_them_all_and_nothing_without_the_option(
    worker: WorkerMetrics, router: RouterMetrics, accept: str
) -> None:
    draw, _ = choose_encoder(accept)
    text = b"".join(draw(page_of(metrics)) for metrics in (worker, router)).decode()
    for name, kind in NAMES.items():
        shown = f"{name}_total" if kind == "counter" and accept == "text/plain" else name
        assert text.count(f"# TYPE {shown} {kind}\n") == 1
    assert text.count("# TYPE vllm:") == len(NAMES)
    plain = b"".join(draw(page_of(metrics, vllm=False)) for metrics in (worker, router)).decode()
    assert "vllm:" not in plain


def test_a_worker_without_blocks_uses_none() -> None:
    metrics = WorkerMetrics(CollectorRegistry())
    metrics.kv_blocks.labels("decode-0", "decode", "free").set(0)
    assert page_of(metrics).get_sample_value("vllm:kv_cache_usage_perc", WORKER) == 0


def test_the_page_of_the_cluster_has_them(worker: WorkerMetrics, router: RouterMetrics) -> None:
    texts = [generate_latest(page_of(metrics)).decode() for metrics in (worker, router)]
    merged = merge_pages(texts).decode()
    families = text_string_to_metric_families(merged)
    found = {one.name: one for one in families if one.name.startswith("vllm:")}
    assert {name: one.type for name, one in found.items()} == NAMES
    running = [one.value for one in found["vllm:num_requests_running"].samples]
    assert running == [3, 5]
