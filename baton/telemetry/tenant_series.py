"""Counters by tenant and API key, with a bounded number of series.

They are apart from the counters by class: their product would be thousands of series, and sums over
either stay exact. A request is counted once, at its end, and its tokens as they come.
"""

from __future__ import annotations

from prometheus_client import Counter

MAX_CALLERS = 256
"""Maximum number of keys with own series in one process. Key files are reloaded while a router
runs, so the number of names that it sees over time has no bound."""
OTHER = "other"
"""Label of all tenants, or keys, beyond ``MAX_CALLERS``."""


class CallerSeries:
    """The series of one tenant and API key."""

    def __init__(self, requests: Counter, tokens: Counter, tenant: str, key: str) -> None:
        self._requests, self._labels = requests, (tenant, key)
        self.prompt, self.cached_prompt, self.generated = (
            tokens.labels(tenant, key, kind) for kind in ("prompt", "cached_prompt", "generated")
        )
        self._ends: dict[tuple[str, str], Counter] = {}

    def ended(self, outcome: str, code: str) -> None:
        """Count a request that has ended; ``code`` is empty unless it ended with an error."""
        end = outcome, code
        counted = self._ends.get(end)
        if counted is None:
            counted = self._ends[end] = self._requests.labels(*self._labels, *end)
        counted.inc()


class TenantSeries:
    """The series of all tenants and API keys of a router process."""

    def __init__(self, requests: Counter, tokens: Counter) -> None:
        """``requests`` has the labels tenant, key, outcome and code, ``tokens`` tenant, key and
        kind."""
        self._requests, self._tokens = requests, tokens
        self._callers: dict[tuple[str, str], CallerSeries] = {}
        self._others: dict[str, CallerSeries] = {}

    def of(self, tenant: str, key: str) -> CallerSeries:
        """Return the series of a tenant's API key. ``key`` is its public name; empty if none was
        shown."""
        known = self._callers.get((tenant, key))
        if known is not None:
            return known
        if len(self._callers) < MAX_CALLERS:
            made = self._callers[tenant, key] = self._made(tenant, key)
            return made
        if tenant not in self._others and len(self._others) >= MAX_CALLERS:
            tenant = OTHER
        if tenant not in self._others:
            self._others[tenant] = self._made(tenant, OTHER)
        return self._others[tenant]

    def _made(self, tenant: str, key: str) -> CallerSeries:
        return CallerSeries(self._requests, self._tokens, tenant, key)
