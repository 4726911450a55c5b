"""Traffic and refused requests of each tenant, from the router's counters by tenant.

Plain data and pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    DeadlineUnreachable,
    Overloaded,
    RateLimitExceeded,
    classes_by_code,
)
from router.billing.ledger import OTHER_TENANTS
from router.console.rates import Growth

REQUESTS, TOKENS = "tenant_requests", "tenant_tokens"
"""Names of the counters: by tenant, outcome and error code; by tenant and kind."""


def _codes(*errors: type[BatonError], without: Collection[str] = ()) -> frozenset[str]:
    """Return the codes of errors and of their subclasses."""
    return frozenset(
        code
        for code, error in classes_by_code().items()
        if code and issubclass(error, errors) and code not in without
    )


_LATE = _codes(DeadlineExceeded, DeadlineUnreachable)
_LIMITED = _codes(RateLimitExceeded)
_OVERLOADED = _codes(Overloaded, without=_LATE | _LIMITED)


@dataclass(frozen=True, slots=True)
class TenantView:
    """Requests of a tenant. Rates and numbers cover the same times as those of a snapshot."""

    tenant: str
    requests_per_s: float
    prompt_tokens_per_s: float
    output_tokens_per_s: float
    limited: int
    """Number of requests that a rate limit or a budget refused."""
    overloaded: int
    """Number of requests that were refused because the cluster was overloaded."""
    late: int
    """Number of requests whose deadline passed, or could not be met."""
    failed: int
    """Number of requests that ended with another error."""


def tenant_views(growth: Growth, configured: Collection[str]) -> tuple[TenantView, ...]:
    """Return the view of every configured tenant, and of all others together if there are any."""
    groups = {name: {name} for name in configured}
    seen = {key[1] for key in growth.grown if key[0] == REQUESTS}
    if others := seen.difference(configured):
        groups[OTHER_TENANTS] = others
    return tuple(_view(name, tenants, growth) for name, tenants in groups.items())


def _view(name: str, tenants: Collection[str], growth: Growth) -> TenantView:
    codes: Counter[str] = Counter()
    for key, value in growth.grown.items():
        if key[0] == REQUESTS and key[1] in tenants:
            codes[key[-1]] += round(value)

    def count(wanted: Collection[str]) -> int:
        return sum(codes[code] for code in wanted)

    def per_s(kind: str) -> float:
        return sum(growth.per_s(TOKENS, tenant, kind) for tenant in tenants)

    limited, overloaded, late = map(count, (_LIMITED, _OVERLOADED, _LATE))
    return TenantView(
        tenant=name,
        requests_per_s=sum(growth.per_s(REQUESTS, tenant) for tenant in tenants),
        prompt_tokens_per_s=per_s("prompt"),
        output_tokens_per_s=per_s("generated"),
        limited=limited,
        overloaded=overloaded,
        late=late,
        # Requests that ended without an error have no code.
        failed=codes.total() - codes[""] - limited - overloaded - late,
    )
