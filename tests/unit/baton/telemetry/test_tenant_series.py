"""Counters by tenant and key: exact sums, and no more series than the bound allows."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.telemetry.metrics import RouterMetrics
from baton.telemetry.tenant_series import MAX_CALLERS, OTHER


def values(registry: CollectorRegistry, name: str) -> dict[tuple[str, ...], float]:
    return {
        tuple(sample.labels.values()): sample.value
        for family in registry.collect()
        for sample in family.samples
        if sample.name == name
    }


def test_requests_and_tokens_of_each_key() -> None:
    registry = CollectorRegistry()
    series = RouterMetrics(registry).tenants
    series.of("acme", "blue").count("ok", 10, 4, 7)
    series.of("acme", "blue").count("ok", 1)
    series.of("acme", "red").count("shed")
    series.of("default", "").count("aborted", 3, 0, 1)
    assert values(registry, "baton_tenant_requests_total") == {
        ("acme", "blue", "ok"): 2,
        ("acme", "red", "shed"): 1,
        ("default", "", "aborted"): 1,
    }
    tokens = values(registry, "baton_tenant_tokens_total")
    assert tokens["acme", "blue", "prompt"] == 11
    assert tokens["acme", "blue", "cached_prompt"] == 4
    assert tokens["acme", "blue", "generated"] == 7
    assert sum(tokens.values()) == 10 + 4 + 7 + 1 + 3 + 1


def test_the_number_of_series_is_bounded_and_no_request_is_missing() -> None:
    registry = CollectorRegistry()
    series = RouterMetrics(registry).tenants
    count = 3 * MAX_CALLERS
    for number in range(count):
        series.of("acme", f"key-{number}").count("ok", 2)
    for number in range(count):
        series.of(f"tenant-{number}", "key").count("ok", 2)
    series.of("acme", "key-0").count("ok", 2)
    requests = values(registry, "baton_tenant_requests_total")
    assert requests["acme", "key-0", "ok"] == 2, "a known key keeps its series"
    assert requests["acme", OTHER, "ok"] == count - MAX_CALLERS, "its tenant is still known"
    assert requests[OTHER, OTHER, "ok"] > 0
    assert sum(requests.values()) == 2 * count + 1
    assert len(requests) <= 2 * MAX_CALLERS + 1
    tokens = values(registry, "baton_tenant_tokens_total")
    assert sum(tokens.values()) == 2 * sum(requests.values())
