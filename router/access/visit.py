"""Visit: the record of a request that counts against the limits of its API key or tenant."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.access import KeyConfig
from router.billing.budgets import Hold


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much of one limit of an API key is left at one moment."""

    name: str
    """What the limit counts: ``requests`` or ``tokens``."""
    limit: int
    """The maximum number of requests or tokens per minute."""
    remaining: int
    reset_s: float
    """Seconds until the whole limit is available again if no further request arrives."""

    def headers(self) -> dict[str, str]:
        """Return the response headers that show the limit, with the names and the format of
        OpenAI's API."""
        prefix = "x-ratelimit"
        return {
            f"{prefix}-limit-{self.name}": str(self.limit),
            f"{prefix}-remaining-{self.name}": str(self.remaining),
            f"{prefix}-reset-{self.name}": duration(self.reset_s),
        }


@dataclass(slots=True, eq=False)
class Visit:
    """The record of a request that counts against the limits of its API key or tenant, from arrival
    to end."""

    key: KeyConfig
    hold: Hold
    """The amounts that the request holds of budgets. ``hold.entry`` is also the name of the request
    in the Redis set of the API key's running requests."""
    lease_s: float
    """Seconds for which the request counts as running, unless its end is reported or the lease is
    renewed."""
    entered_at: float
    sent: bool = False
    """Whether Redis may have received a count or charge of the request."""
    unsure: bool = True
    """Whether Redis may have missed some counts or charges of the request."""
    reserved: int = 0
    """Number of tokens charged in advance for the request."""
    tokens: int = 0
    """Number of tokens that the request has used."""
    allowances: tuple[Allowance, ...] = ()
    """What is left of each limit of the API key, by the latest answer of Redis."""

    def headers(self) -> dict[str, str]:
        """Return response headers that show the client its remaining limits."""
        return {
            name: value
            for allowance in self.allowances
            for name, value in allowance.headers().items()
        }


def duration(seconds: float) -> str:
    """Format a duration as ``250ms``, ``1.5s`` or ``2m0s``. Round it up to milliseconds, or to
    seconds if it is one minute or more."""
    milliseconds = max(0, -int(-seconds * 1000 // 1))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    whole = -(-milliseconds // 1000)
    return f"{whole // 60}m{whole % 60}s"
