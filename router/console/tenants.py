"""Traffic and refused requests of each tenant, as this router process counts them.

Plain data and pure functions.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping
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
from router.console.rates import Growth, Key
from router.core.accounting import TenantCounts

_REQUESTS, _REFUSED = "tenant_requests", "tenant_refused"
_PROMPT, _GENERATED = "tenant_prompt_tokens", "tenant_generated_tokens"


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


def tenant_counts(
    counts: TenantCounts, refused: Mapping[tuple[str, str], int], configured: Collection[str]
) -> dict[Key, float]:
    """Return all counts by key. Tenants that are not ``configured`` are summed.

    ``refused`` has the requests that limits refused, by tenant and error code; ``counts`` the
    others.
    """
    found: dict[Key, float] = {}

    def add(name: str, tenant: str, *labels: str, value: int) -> None:
        key = name, tenant if tenant in configured else OTHER_TENANTS, *labels
        found[key] = found.get(key, 0.0) + value

    for (tenant, outcome, code), value in counts.requests.items():
        add(_REQUESTS, tenant, outcome, code, value=value)
    for (tenant, code), value in refused.items():
        add(_REFUSED, tenant, code, value=value)
    for tenant, value in counts.prompt_tokens.items():
        add(_PROMPT, tenant, value=value)
    for tenant, value in counts.generated_tokens.items():
        add(_GENERATED, tenant, value=value)
    return found


def tenant_views(growth: Growth, configured: Collection[str]) -> tuple[TenantView, ...]:
    """Return the view of every configured tenant, and of all others together if there are any.
    ``growth`` is that of counts by the keys of ``tenant_counts``."""
    codes: dict[str, Counter[str]] = {name: Counter() for name in configured}
    for key, value in growth.grown.items():
        if key[0] in (_REQUESTS, _REFUSED):
            codes.setdefault(key[1], Counter())[key[-1]] += round(value)
    return tuple(_view(tenant, of, growth) for tenant, of in codes.items())


def _view(tenant: str, codes: Mapping[str, int], growth: Growth) -> TenantView:
    def count(wanted: Collection[str]) -> int:
        return sum(value for code, value in codes.items() if code in wanted)

    limited, overloaded, late = map(count, (_LIMITED, _OVERLOADED, _LATE))
    return TenantView(
        tenant=tenant,
        requests_per_s=growth.per_s(_REQUESTS, tenant) + growth.per_s(_REFUSED, tenant),
        prompt_tokens_per_s=growth.per_s(_PROMPT, tenant),
        output_tokens_per_s=growth.per_s(_GENERATED, tenant),
        limited=limited,
        overloaded=overloaded,
        late=late,
        # Requests that ended without an error have no code.
        failed=sum(value for code, value in codes.items() if code) - limited - overloaded - late,
    )
