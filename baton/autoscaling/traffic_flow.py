"""The traffic between two looks at what routers tell. Pure: ``now`` is passed in.

A router is told of by its life, so that counts never go back. One that was started since the last
look counts from the next one on. While one has said nothing for ``SILENT_S`` nobody knows what it
serves: then there are no figures, until it speaks again or has been silent for ``GONE_S``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.autoscaling.traffic_counts import ToldTraffic, TrafficCounts

SILENT_S = 5.0
GONE_S = 60.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has come of all routers together."""

    seconds: float
    """In so many."""
    counts: TrafficCounts


@dataclass(slots=True)
class _Router:
    told: ToldTraffic
    heard_at: float


class TrafficFlow:
    """See the module's text. Times are seconds of any one clock."""

    def __init__(self) -> None:
        self._routers: dict[str, _Router] = {}
        self._looked_at: float | None = None

    def look(self, told: Mapping[str, ToldTraffic], now: float) -> Traffic | None:
        """The traffic since the last look; None where that is not known."""
        added = []
        for name, one in told.items():
            known = self._routers.get(name)
            if known is None:
                self._routers[name] = _Router(one, now)
                continue
            if one.beat != known.told.beat:
                known.heard_at = now
            added.append(one.counts.since(known.told.counts))
            known.told = one
        for name in self._routers.keys() - told.keys():
            # One that leaves says so.
            del self._routers[name]
        before, self._looked_at = self._looked_at, now
        if before is None or now <= before or not added or self._silent(now):
            return None
        return Traffic(now - before, TrafficCounts.total(added))

    def gone(self, now: float) -> list[str]:
        """Those that have been silent for so long that they will not speak again."""
        return [name for name, one in self._routers.items() if now - one.heard_at >= GONE_S]

    def _silent(self, now: float) -> bool:
        return any(now - one.heard_at >= SILENT_S for one in self._routers.values())
