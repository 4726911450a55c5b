"""What bringing blocks back from the tiers would take, and whether it beats computing them.

A load takes a fixed time, and its bytes over each tier's bandwidth, which is learned from the loads
before. A tier whose loads fail, or take too long, is left alone for a while, longer each time.

Plain Python: data and ``now`` in, data out. Times are in seconds, sizes in bytes by tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from worker.costs.unit_cost import UnitCost

FIXED_S = 0.002
"""Two threads that have to be woken, and the plan that follows."""
BYTES_PER_S = {"host": 4e9, "disk": 5e8}
"""Until loads have shown it: one core's copy, and a modest solid-state disk."""
_PRIOR_BYTES = 4 << 20
"""How much that counts beside the first loads."""
_DEADLINE_FACTOR = 4.0
_SHORTEST_DEADLINE_S = 0.5
"""Less would end loads because a machine was busy for a moment."""
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class _Tier:
    """What is known of one tier."""

    def __init__(self, bytes_per_s: float) -> None:
        self.pace = UnitCost(1 / bytes_per_s, _PRIOR_BYTES)
        self.failures = 0
        self.paused_until = float("-inf")


class TierEstimates:
    """See the module's text."""

    def __init__(self, names: Iterable[str]) -> None:
        """``names`` are the tiers', of ``BYTES_PER_S``."""
        self._tiers = {name: _Tier(BYTES_PER_S[name]) for name in names}

    def load_s(self, sizes: Mapping[str, int]) -> float:
        """How long a load will take."""
        return FIXED_S + sum(size * self._tiers[name].pace.unit_s for name, size in sizes.items())

    def pays(self, sizes: Mapping[str, int], compute_s: float, now: float) -> bool:
        """Whether to load rather than to compute for ``compute_s``."""
        if any(now < self._tiers[name].paused_until for name in sizes):
            return False
        return self.load_s(sizes) < compute_s

    def deadline_s(self, sizes: Mapping[str, int], compute_s: float) -> float:
        """When to give a load up that saves ``compute_s``.

        After a few times what it should take, but not after what it saves would have been computed.
        """
        return max(_SHORTEST_DEADLINE_S, min(_DEADLINE_FACTOR * self.load_s(sizes), compute_s))

    def succeeded(self, name: str, size: int, seconds: float) -> None:
        """``size`` bytes came back from a tier."""
        tier = self._tiers[name]
        tier.failures = 0
        tier.pace.observe(size, seconds)

    def failed(self, names: Iterable[str], now: float) -> None:
        """A load from these tiers came to nothing, or took too long."""
        for name in names:
            tier = self._tiers[name]
            pause = min(_FIRST_PAUSE_S * 2.0 ** min(tier.failures, 30), _LONGEST_PAUSE_S)
            tier.failures += 1
            tier.paused_until = now + pause
