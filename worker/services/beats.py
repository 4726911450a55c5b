"""How often a worker says on a stream that it lives, where it has nothing else to say."""

from __future__ import annotations

from dataclasses import dataclass

from baton.config.cluster import Config

_BEATS_IN_TIME = 4
"""So many come in the time after which a router takes silence for a hang."""


@dataclass(frozen=True, slots=True)
class Beats:
    """In seconds between two: often to a router that waits for something, else seldom."""

    busy_s: float
    idle_s: float

    @classmethod
    def of(cls, config: Config) -> Beats:
        """What the configuration asks for."""
        heartbeat_s, hang_s = config.advanced.heartbeat_s, config.advanced.hang_s
        return cls(min(heartbeat_s, hang_s / _BEATS_IN_TIME), heartbeat_s)

    def next_s(self, *, busy: bool) -> float:
        """When the next one is due."""
        return self.busy_s if busy else self.idle_s


DEFAULT_BEATS = Beats(busy_s=0.25, idle_s=1.0)
