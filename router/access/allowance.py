"""What is left of an API key's limits, as the usual headers tell it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Allowance:
    """One limit of a key at one moment."""

    name: str
    """``requests`` or ``tokens``."""
    limit: int
    """In a minute."""
    remaining: int
    reset_s: float
    """Seconds until all of it is there again."""

    def headers(self) -> dict[str, str]:
        """As OpenAI's API names and writes them."""
        prefix = "x-ratelimit"
        return {
            f"{prefix}-limit-{self.name}": str(self.limit),
            f"{prefix}-remaining-{self.name}": str(self.remaining),
            f"{prefix}-reset-{self.name}": duration(self.reset_s),
        }


def duration(seconds: float) -> str:
    """``250ms``, ``1.5s``, ``2m0s``: rounded up to milliseconds, or to seconds from a minute on."""
    milliseconds = max(0, -int(-seconds * 1000 // 1))
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    if milliseconds < 60_000:
        return f"{milliseconds / 1000:g}s"
    whole = -(-milliseconds // 1000)
    return f"{whole // 60}m{whole % 60}s"
