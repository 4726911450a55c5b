"""Configured tenants have a view each, the others one together."""

from __future__ import annotations

from collections import Counter

from router.console.rates import CounterWindow, Growth
from router.console.tenants import TenantView, tenant_counts, tenant_views
from router.core.accounting import Outcome, TenantCounts

CONFIGURED = ("default", "gold", "silver")


def test_requests_tokens_and_refusals_of_each_tenant() -> None:
    counts, refused = TenantCounts(), Counter[tuple[str, str]]()
    window = CounterWindow(60)
    window.add(0.0, tenant_counts(counts, refused, CONFIGURED))
    for outcome, code, times in (
        (Outcome.OK, "", 10),
        (Outcome.SHED, "overloaded", 1),
        (Outcome.SHED, "no_decode_room", 1),
        (Outcome.SHED, "deadline_unreachable", 3),
        (Outcome.ERROR, "deadline_exceeded", 4),
        (Outcome.ERROR, "worker_failed", 5),
        (Outcome.ABORTED, "", 6),
    ):
        for _ in range(times):
            counts.ended("gold", outcome, code)
    refused["gold", "rate_limit_exceeded"] = 7
    refused["gold", "insufficient_quota"] = 8
    counts.prompt_tokens["gold"], counts.generated_tokens["gold"] = 100, 200
    counts.ended("guest", Outcome.OK, "")
    counts.ended("visitor", Outcome.OK, "")
    window.add(10.0, tenant_counts(counts, refused, CONFIGURED))
    found = {one.tenant: one for one in tenant_views(Growth.of(window, 10, 60), CONFIGURED)}
    assert list(found) == [*CONFIGURED, "other"]
    assert found["gold"] == TenantView("gold", 4.5, 10.0, 20.0, 15, 2, 7, 5)
    assert found["silver"] == TenantView("silver", 0.0, 0.0, 0.0, 0, 0, 0, 0)
    assert found["other"].requests_per_s == 0.2
