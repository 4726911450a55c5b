"""Predicts how long a load from the tiers takes, and whether it beats computing.

A load takes a fixed time, plus its bytes divided by each tier's bandwidth. The bandwidth is learned
from earlier loads. After a load that failed or was too slow, a tier is not used for a while, which
gets longer with each failure.

Plain Python: data and ``now`` in, data out. Times are in seconds, sizes in bytes by tier.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from worker.costs.step_costs import UnitCost

FIXED_S = 0.002
"""Fixed seconds of a load from the tiers: two threads are woken, and the next step is planned."""
BYTES_PER_S = {"host": 4e9, "disk": 5e8}
"""Assumed bytes per second of each tier until loads are measured. The values are those of a copy by
one core, and of a modest solid-state disk."""
_PRIOR_BYTES = 4 << 20
"""Weight of the assumed bandwidth against the first loads, in bytes."""
_DEADLINE_FACTOR = 4.0
_SHORTEST_DEADLINE_S = 0.5
"""Minimum deadline of a load, in seconds. With a shorter one, loads would be given up whenever the
machine is briefly busy."""
_FIRST_PAUSE_S = 5.0
_LONGEST_PAUSE_S = 300.0


class LoadSource:
    """A source of blocks, with its learned bandwidth. It is not used for a while after failed
    loads."""

    def __init__(self, bytes_per_s: float, prior_bytes: int) -> None:
        """``bytes_per_s`` is the bandwidth that is assumed until loads are measured.

        It counts as much as a measured load of ``prior_bytes``.
        """
        self._byte_cost = UnitCost(1 / bytes_per_s, prior_bytes)
        self._failures = 0
        self._paused_until = float("-inf")

    def load_s(self, size: int) -> float:
        """Predict the seconds to load ``size`` bytes from this source."""
        return size * self._byte_cost.unit_s

    def is_paused(self, now: float) -> bool:
        """Whether the source must not be used at time ``now``, because loads from it have
        failed."""
        return now < self._paused_until

    def succeeded(self, size: int, seconds: float) -> None:
        """Record that a load of ``size`` bytes from this source took ``seconds``."""
        self._failures = 0
        self._byte_cost.observe(size, seconds)

    def failed(self, now: float) -> None:
        """Record that a load from this source failed or took too long."""
        pause = min(_FIRST_PAUSE_S * 2.0 ** min(self._failures, 30), _LONGEST_PAUSE_S)
        self._failures += 1
        self._paused_until = now + pause


def load_deadline_s(load_s: float, compute_s: float) -> float:
    """Return the seconds after which to give up a load. The load is predicted to take ``load_s``
    seconds, and computing the same blocks takes ``compute_s``.

    The result is a few times ``load_s``, but not more than the time that the load saves.
    """
    return max(_SHORTEST_DEADLINE_S, min(_DEADLINE_FACTOR * load_s, compute_s))


class TierEstimates:
    """Predicts load times from the learned bandwidth of each tier."""

    def __init__(self, names: Iterable[str]) -> None:
        """``names`` are the names of the tiers, which are keys of ``BYTES_PER_S``."""
        self._tiers = {name: LoadSource(BYTES_PER_S[name], _PRIOR_BYTES) for name in names}

    def load_s(self, sizes: Mapping[str, int]) -> float:
        """Predict the seconds of one load. ``sizes`` has the number of bytes to load from each
        tier."""
        return FIXED_S + sum(self._tiers[name].load_s(size) for name, size in sizes.items())

    def pays(self, sizes: Mapping[str, int], compute_s: float, now: float) -> bool:
        """Whether a load is predicted to be faster than computing, which takes ``compute_s``
        seconds. ``sizes`` has the number of bytes to load from each tier."""
        if any(self._tiers[name].is_paused(now) for name in sizes):
            return False
        return self.load_s(sizes) < compute_s

    def deadline_s(self, sizes: Mapping[str, int], compute_s: float) -> float:
        """Return the seconds after which to give up a load. Computing the same blocks takes
        ``compute_s`` seconds."""
        return load_deadline_s(self.load_s(sizes), compute_s)

    def succeeded(self, name: str, size: int, seconds: float) -> None:
        """Record that a load of ``size`` bytes from tier ``name`` took ``seconds``."""
        self._tiers[name].succeeded(size, seconds)

    def failed(self, names: Iterable[str], now: float) -> None:
        """Record that a load from these tiers failed or took too long."""
        for name in names:
            self._tiers[name].failed(now)
