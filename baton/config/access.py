"""Tenants and API keys: their shares, limits and permissions."""

from __future__ import annotations

import re

from pydantic import AwareDatetime, Field, field_validator

from baton.config.choices import DEFAULT_TENANT, Scope
from baton.config.money import Budgeted

NAME_PATTERN = r"^[A-Za-z0-9._-]{1,64}$"


class TenantConfig(Budgeted):
    """Tenants share the cluster in proportion to their weights."""

    name: str = Field(pattern=NAME_PATTERN)
    """Name of the tenant in metrics. Its prefix cache is shared with no other tenant."""
    weight: float = Field(default=1.0, ge=0.001, le=1000)
    """Share of the tokens, relative to the weights of other tenants that wait at the same time."""
    max_pinned_fraction: float = Field(default=0.25, ge=0, le=1)
    """Maximum fraction of each worker's KV blocks that the tenant's pinned prefixes and retentions
    keep. ``max_pinned_fraction`` of the cluster bounds all tenants together."""
    cache_ttl_s: float = Field(default=0.0, ge=0)
    """Maximum time that a block of the tenant's prefix cache stays without use, in seconds; 0 sets
    no bound. Pinned blocks stay longer. With a bound, blocks are not copied to KV tiers."""


class KeyConfig(Budgeted):
    """An API key: its tenant, limits and scopes."""

    name: str = Field(pattern=NAME_PATTERN)
    """Public name of the key, for metrics and logs."""
    sha256: str = Field(default="", pattern="^([0-9a-f]{64})?$")
    """SHA-256 of the key in hexadecimal digits. One entry may leave it empty: it holds for requests
    without a known key."""
    tenant: str
    """Name of the key's tenant, ``default`` or another one. Keys of one tenant share cached
    prompts, files and batches."""
    priority: int = Field(default=0, ge=-(1 << 31), lt=1 << 31)
    """Priority of requests that set none. Among requests of one tenant, lower values are served
    first."""
    requests_per_minute: int = Field(default=0, ge=0)
    """Maximum number of requests per minute over all routers; 0 is unlimited."""
    tokens_per_minute: int = Field(default=0, ge=0)
    """Maximum number of tokens per minute, of prompts and answers, over all routers; 0 is
    unlimited."""
    concurrency: int = Field(default=0, ge=0)
    """Maximum number of concurrent requests over all routers; 0 is unlimited."""
    scopes: tuple[Scope, ...] = Field(default=("inference",), min_length=1)
    """What the key allows: requests to the model, files and batches (inference); reading metrics
    and the console (metrics); all of that and operating the cluster (admin)."""
    expires_at: AwareDatetime | None = None
    """Time at which the key expires, with a time zone; without a value it never does."""

    @field_validator("tenant")
    @classmethod
    def _tenant_has_a_name(cls, tenant: str) -> str:
        # Without a tenant the key's prompts would share the cache of another tenant.
        if not re.fullmatch(NAME_PATTERN, tenant):
            raise ValueError(
                f"a tenant's name is 1 to 64 letters, digits, dots, dashes and underscores, not"
                f" {tenant!r}: write {DEFAULT_TENANT!r} for the tenant that all other requests have"
            )
        return tenant

    def allows(self, scope: Scope) -> bool:
        """Whether the key has ``scope``, or has the scope admin, which includes all others."""
        return scope in self.scopes or "admin" in self.scopes

    @property
    def limited(self) -> bool:
        """Whether the key has any limit, so that its use must be counted."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrency)
