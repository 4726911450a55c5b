"""What a router's own requests use of API keys' limits: the count that holds while Redis is away.

It follows the rules of ``router.access.limit_scripts``, for the requests of one router process. So
while Redis is away, each router admits at most what a limit allows.

    arrives ─a limit is used up→ refused
            ─counted→ charged what it may cost ─it ends→ charged what it took

Plain Python; ``now`` is in seconds of any one clock. Owned by the router's event loop.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field

from baton.config.access import KeyConfig

MINUTE_S = 60.0
_NONE = 0
_CONCURRENCY = 3
_MICROSECONDS = 1_000_000


@dataclass(slots=True)
class _Count:
    """The requests of one API key."""

    arrivals: list[float] = field(default_factory=lambda: [-math.inf, -math.inf])
    """Theoretical arrival times of the next request and of the next token."""
    running: dict[str, int] = field(default_factory=dict)
    """The tokens that running requests were charged so far, by entry."""


class OwnLimits:
    """Counts the requests of one router process against API keys' limits."""

    def __init__(self) -> None:
        self._counts: defaultdict[str, _Count] = defaultdict(_Count)

    def charge(
        self, key: KeyConfig, entry: str, tokens: int, now: float, *, enforced: bool
    ) -> list[int]:
        """Count a request that arrives, or charge a running one ``tokens`` tokens in all.

        ``entry`` names the request. ``enforced``: whether a limit that is used up refuses it; it is
        not counted then. Returns what the script ``ENTER`` returns for a key without budgets: the
        number of the limit that refused and the wait, then remaining and time to the full limit for
        requests and for tokens. Times are in microseconds."""
        count = self._counts[key.name]
        arrives = entry not in count.running
        more = max(0, tokens - count.running.get(entry, 0))
        limits, costs = (key.requests_per_minute, key.tokens_per_minute), (int(arrives), more)
        refused, wait_s = _NONE, 0.0
        before = [max(now, at) for at in count.arrivals]
        after = [
            at + (cost * MINUTE_S / limit if limit else 0.0)
            for at, cost, limit in zip(before, costs, limits, strict=True)
        ]
        for number, (at, cost) in enumerate(zip(after, costs, strict=True), 1):
            over_s = at - now - MINUTE_S
            if enforced and cost and over_s > max(1e-6, wait_s):
                refused, wait_s = number, over_s
        is_full = 0 < key.concurrency <= len(count.running)
        if enforced and arrives and not refused and is_full:
            refused = _CONCURRENCY
        if not refused:
            count.arrivals = after
            count.running[entry] = count.running.get(entry, 0) + more
        left_s = [at - now for at in (before if refused else after)]
        shown = [
            number
            for left, limit in zip(left_s, limits, strict=True)
            for number in (
                max(0, math.floor((MINUTE_S - left) * limit / MINUTE_S + 0.001)),
                math.ceil(left * _MICROSECONDS),
            )
        ]
        return [refused, math.ceil(wait_s * _MICROSECONDS), *shown]

    def leave(self, key: KeyConfig, entry: str, tokens: int, now: float) -> None:
        """Record that a request has ended, and charge the ``tokens`` that it took instead of those
        that it might cost. A request that is not counted is ignored."""
        count = self._counts[key.name]
        charged = count.running.pop(entry, None)
        if charged is not None and key.tokens_per_minute:
            more_s = (tokens - charged) * MINUTE_S / key.tokens_per_minute
            count.arrivals[1] = max(now, count.arrivals[1]) + more_s
        if not count.running and max(count.arrivals) <= now:
            del self._counts[key.name]
