"""What bringing blocks back from the tiers would take, and whether it beats computing them.

A load takes a fixed time, and its bytes over each tier's bandwidth, which is learned from the loads
before. A tier whose loads fail, or take too long, is left alone for a while, longer each time.

Plain Python: data and ``now`` in, data out. Times are in seconds, sizes in bytes by tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from worker.costs.step_costs import UnitCost

FIXED_S = 0.002
"""Two threads that have to be woken, and the plan that follows."""
BYTES_PER_S = {"host": 4e9, "disk": 5e8}
"""Until loads have shown it: one core's copy, and a modest solid-state disk."""
_PRIOR_BYTES = 4 << 20
"""Bytes as which the assumed bandwidth counts next to the first loads."""
_DEADLINE_FACTOR = 4.0
_SHORTEST_DEADLINE_S = 0.5
"""Less would end loads because a machine was busy for a moment."""
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class LoadSource:
    """A place from which blocks are loaded: its bandwidth, and a pause after failures."""

    def __init__(self, bytes_per_s: float, prior_bytes: int) -> None:
        """``bytes_per_s`` holds until loads have shown another bandwidth.

        It counts as ``prior_bytes`` that were loaded so fast.
        """
        self._byte_cost = UnitCost(1 / bytes_per_s, prior_bytes)
        self._failures = 0
        self._paused_until = float("-inf")

    def load_s(self, size: int) -> float:
        """Seconds that ``size`` bytes will take."""
        return size * self._byte_cost.unit_s

    def is_paused(self, now: float) -> bool:
        """Whether it is left alone, since loads have failed."""
        return now < self._paused_until

    def succeeded(self, size: int, seconds: float) -> None:
        """``size`` bytes have come."""
        self._failures = 0
        self._byte_cost.observe(size, seconds)

    def failed(self, now: float) -> None:
        """A load came to nothing, or took too long."""
        pause = min(_FIRST_PAUSE_S * 2.0 ** min(self._failures, 30), _LONGEST_PAUSE_S)
        self._failures += 1
        self._paused_until = now + pause


def load_deadline_s(load_s: float, compute_s: float) -> float:
    """Seconds after which a load is given up that should take ``load_s`` and saves ``compute_s``.

    After a few times what it should take, but not after what it saves would have been computed.
    """
    return max(_SHORTEST_DEADLINE_S, min(_DEADLINE_FACTOR * load_s, compute_s))


class TierEstimates:
    """Load times by tier."""

    def __init__(self, names: Iterable[str]) -> None:
        """``names`` are the tiers', of ``BYTES_PER_S``."""
        self._tiers = {name: LoadSource(BYTES_PER_S[name], _PRIOR_BYTES) for name in names}

    def load_s(self, sizes: Mapping[str, int]) -> float:
        """How long a load will take."""
        return FIXED_S + sum(self._tiers[name].load_s(size) for name, size in sizes.items())

    def pays(self, sizes: Mapping[str, int], compute_s: float, now: float) -> bool:
        """Whether to load rather than to compute for ``compute_s``."""
        if any(self._tiers[name].is_paused(now) for name in sizes):
            return False
        return self.load_s(sizes) < compute_s

    def deadline_s(self, sizes: Mapping[str, int], compute_s: float) -> float:
        """Seconds after which a load is given up that saves ``compute_s``."""
        return load_deadline_s(self.load_s(sizes), compute_s)

    def succeeded(self, name: str, size: int, seconds: float) -> None:
        """``size`` bytes came back from a tier."""
        self._tiers[name].succeeded(size, seconds)

    def failed(self, names: Iterable[str], now: float) -> None:
        """A load from these tiers came to nothing, or took too long."""
        for name in names:
            self._tiers[name].failed(now)
