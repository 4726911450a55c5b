"""Configured tenants have a view each, the others one together."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.telemetry.metrics import RouterMetrics
from router.console.rates import CounterWindow, Growth
from router.console.sampler import read_router
from router.console.tenants import TenantView, tenant_views

CONFIGURED = ("default", "gold", "silver")


def test_requests_tokens_and_refusals_of_each_tenant() -> None:
    """From the series that the page of metrics shows, over all keys of a tenant."""
    metrics = RouterMetrics(CollectorRegistry())
    window = CounterWindow(60)
    window.add(0.0, read_router(metrics)[0])
    for outcome, code, times in (
        ("ok", "", 10),
        ("shed", "overloaded", 1),
        ("shed", "no_decode_room", 1),
        ("shed", "deadline_unreachable", 3),
        ("error", "deadline_exceeded", 4),
        ("error", "worker_failed", 5),
        ("aborted", "", 6),
        ("shed", "rate_limit_exceeded", 7),
        ("shed", "insufficient_quota", 8),
    ):
        for number in range(times):
            metrics.tenants.of("gold", f"key-{number % 2}").ended(outcome, code)
    gold, guest = metrics.tenants.of("gold", "key-0"), metrics.tenants.of("guest", "")
    gold.prompt.inc(100)
    gold.cached_prompt.inc(50)
    gold.generated.inc(200)
    guest.ended("ok", "")
    metrics.tenants.of("visitor", "").ended("ok", "")
    guest.generated.inc(10)
    window.add(10.0, read_router(metrics)[0])
    found = {one.tenant: one for one in tenant_views(Growth.of(window, 10, 60), CONFIGURED)}
    assert list(found) == [*CONFIGURED, "other"]
    assert found["gold"] == TenantView("gold", 4.5, 10.0, 20.0, 15, 2, 7, 5)
    assert found["silver"] == TenantView("silver", 0.0, 0.0, 0.0, 0, 0, 0, 0)
    assert found["other"] == TenantView("other", 0.2, 0.0, 1.0, 0, 0, 0, 0)
