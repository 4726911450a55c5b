"""How many background requests may be with the workers at a time.

Additive increase, multiplicative decrease (D. Chiu and R. Jain, "Analysis of the increase and
decrease algorithms for congestion avoidance in computer networks", Computer Networks and ISDN
Systems 17(1), 1989): one more for each that ends while nobody else is hurt, half as many when
somebody is. Plain Python; ``now`` is passed in.
"""

from __future__ import annotations

import math

HOLD_S = 1.0
"""Harm that is seen again within this time is the same harm: what was halved has had no effect
yet. For as long nothing more is let in."""


class BackgroundShare:
    """Owned by one event loop."""

    def __init__(self, most: int) -> None:
        """At most ``most`` at a time, at least one."""
        self._most = most
        self._limit = 1
        self._hurt_at = -math.inf

    @property
    def limit(self) -> int:
        """How many may be with the workers while nobody is hurt."""
        return self._limit

    def hurt(self, now: float) -> None:
        """Others wait, or their tokens come too slowly."""
        if now - self._hurt_at >= HOLD_S:
            self._limit = max(1, self._limit // 2)
            self._hurt_at = now

    def finished(self, now: float) -> None:
        """One has ended well."""
        if now - self._hurt_at >= HOLD_S:
            self._limit = min(self._most, self._limit + 1)

    def allows(self, in_flight: int, now: float) -> bool:
        """Whether one more may go beside so many."""
        return in_flight < self._limit and now - self._hurt_at >= HOLD_S
