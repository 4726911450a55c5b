"""Visit: a request of a limited key or tenant, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.access import KeyConfig
from router.billing.budgets import Hold


@dataclass(frozen=True, slots=True)
class Allowance:
    """The remaining part of one limit of a key at one moment."""

    name: str
    """What the limit counts: ``requests`` or ``tokens``."""
    limit: int
    """The maximum number of requests or tokens per minute."""
    remaining: int
    reset_s: float
    """Seconds until the limit is full again, if nothing more is used."""

    def headers(self) -> dict[str, str]:
        """Return response headers for the limit, in the names and format of OpenAI's API."""
        prefix = "x-ratelimit"
        return {
            f"{prefix}-limit-{self.name}": str(self.limit),
            f"{prefix}-remaining-{self.name}": str(self.remaining),
            f"{prefix}-reset-{self.name}": duration(self.reset_s),
        }


@dataclass(slots=True, eq=False)
class Visit:
    """A request of a limited key or tenant, from its arrival to its end."""

    key: KeyConfig
    hold: Hold
    """The request's holds on budgets. The hold's ``entry`` is also its name in the key's set of
    running requests."""
    lease_s: float
    """Seconds for which the request counts as running, unless its end is reported or the lease is
    renewed."""
    entered_at: float
    sent: bool = False
    """Whether Redis may have received the request."""
    unsure: bool = True
    """Whether Redis may have missed some charges of the request."""
    reserved: int = 0
    """Number of tokens charged in advance for the request."""
    tokens: int = 0
    """Number of tokens that the request has used."""
    allowances: tuple[Allowance, ...] = ()
    """The key's remaining limits at the latest answer of Redis."""

    def headers(self) -> dict[str, str]:
        """Return response headers that show the client its remaining limits."""
        return {
            name: value
            for allowance in self.allowances
            for name, value in allowance.headers().items()
        }


def duration(seconds: float) -> str:
    """Format a duration as ``250ms``, ``1.5s``, ``2m0s``: rounded up to milliseconds, from one
    minute on to seconds.
    """
    milliseconds = max(0, -int(-seconds * 1000 // 1))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    whole = -(-milliseconds // 1000)
    return f"{whole // 60}m{whole % 60}s"
