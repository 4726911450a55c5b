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
    blue, keyless = series.of("acme", "blue"), series.of("default", "")
    blue.prompt.inc(11)
    blue.cached_prompt.inc(4)
    blue.generated.inc(7)
    for _ in range(2):
        series.of("acme", "blue").ended("ok", "")
    series.of("acme", "red").ended("shed", "overloaded")
    keyless.prompt.inc(3)
    keyless.generated.inc(1)
    keyless.ended("aborted", "")
    assert values(registry, "baton_tenant_requests_total") == {
        ("acme", "blue", "ok", ""): 2,
        ("acme", "red", "shed", "overloaded"): 1,
        ("default", "", "aborted", ""): 1,
    }
    tokens = values(registry, "baton_tenant_tokens_total")
    assert tokens["acme", "blue", "prompt"] == 11
    assert tokens["acme", "blue", "cached_prompt"] == 4
    assert tokens["acme", "blue", "generated"] == 7
    assert sum(tokens.values()) == 11 + 4 + 7 + 3 + 1


def test_the_number_of_series_is_bounded_and_no_request_is_missing() -> None:
    registry = CollectorRegistry()
    series = RouterMetrics(registry).tenants
    count = 3 * MAX_CALLERS
    callers = [("acme", f"key-{number}") for number in range(count)]
    callers += [(f"tenant-{number}", "key") for number in range(count)]
    for tenant, key in (*callers, ("acme", "key-0")):
        of_caller = series.of(tenant, key)
        of_caller.prompt.inc(2)
        of_caller.ended("ok", "")
    requests = values(registry, "baton_tenant_requests_total")
    assert requests["acme", "key-0", "ok", ""] == 2, "a known key keeps its series"
    assert requests["acme", OTHER, "ok", ""] == count - MAX_CALLERS, "its tenant is still known"
    assert requests[OTHER, OTHER, "ok", ""] > 0
    assert sum(requests.values()) == 2 * count + 1
    assert len(requests) <= 2 * MAX_CALLERS + 1
    tokens = values(registry, "baton_tenant_tokens_total")
    assert sum(tokens.values()) == 2 * sum(requests.values())
