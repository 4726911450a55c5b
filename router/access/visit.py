"""Visit: a request of a limited key or tenant, from its arrival to its end."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.access import KeyConfig
from router.billing.budgets import Hold


@dataclass(frozen=True, slots=True)
class Allowance:
    """The remaining part of one limit of a key at one moment."""

    name: str
    """``requests`` or ``tokens``."""
    limit: int
    """The limit per minute."""
    remaining: int
    reset_s: float
    """Seconds until the limit is full again."""

    def headers(self) -> dict[str, str]:
        """Return headers in the names and format of OpenAI's API."""
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
    """Its holds on budgets. The entry also names it among running requests."""
    lease_s: float
    """Seconds for which it counts as running unless it leaves or is renewed."""
    entered_at: float
    sent: bool = False
    """Whether Redis may have received it."""
    unsure: bool = True
    """Whether Redis may have missed a part of it."""
    reserved: int = 0
    """Tokens charged in advance."""
    tokens: int = 0
    """Tokens that it took."""
    allowances: tuple[Allowance, ...] = ()
    """Remaining limits, as last seen."""

    def headers(self) -> dict[str, str]:
        """Return headers with the remaining limits, for the client."""
        return {
            name: value
            for allowance in self.allowances
            for name, value in allowance.headers().items()
        }


def duration(seconds: float) -> str:
    """Format seconds as ``250ms``, ``1.5s``, ``2m0s``: rounded up to ms, from a minute on to s."""
    milliseconds = max(0, -int(-seconds * 1000 // 1))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    whole = -(-milliseconds // 1000)
    return f"{whole // 60}m{whole % 60}s"
