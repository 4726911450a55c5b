"""A request of a limited key or tenant, from its arrival to its end, and what is left of limits."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.access import KeyConfig
from router.billing.budgets import Hold


@dataclass(frozen=True, slots=True)
class Allowance:
    """What is left of one limit of a key at one moment."""

    name: str
    """``requests`` or ``tokens``."""
    limit: int
    """Per minute."""
    remaining: int
    reset_s: float
    """Seconds until the limit is full again."""

    def headers(self) -> dict[str, str]:
        """Headers as OpenAI's API names and writes them."""
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
    """What it holds of its budgets. Its entry also names it among running requests."""
    lease_s: float
    """How long it counts as running unless it leaves or is renewed."""
    entered_at: float
    sent: bool = False
    """Whether Redis may know of it."""
    unsure: bool = True
    """Whether Redis may not have counted something of it."""
    reserved: int = 0
    """Tokens that were charged in advance."""
    tokens: int = 0
    """Tokens that it took."""
    allowances: tuple[Allowance, ...] = ()
    """What is left of the limits, as last seen."""

    def headers(self) -> dict[str, str]:
        """Headers with what is left, for the client."""
        return {
            name: value
            for allowance in self.allowances
            for name, value in allowance.headers().items()
        }


def duration(seconds: float) -> str:
    """``250ms``, ``1.5s``, ``2m0s``: rounded up to milliseconds, from a minute on to seconds."""
    milliseconds = max(0, -int(-seconds * 1000 // 1))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    whole = -(-milliseconds // 1000)
    return f"{whole // 60}m{whole % 60}s"
