"""Counts how long peers have been silent.

Leases use ``baton.liveness.listening.ListeningClock``, which follows the same rule.

    expected ─a sign→ alive ─ticks without a sign→ silent for ``limit_s`` ─the next tick→ found

Silence is counted by the ticks of the listener, on its own monotonic clock. A listener that stood
still, or got no core, has received nothing in that time. The gap says nothing about its peers:

- No tick counts for more than a third of the limit.
- A silence that reaches the limit counts at the next tick. Messages that arrived while the listener
  was held up are read between the two.
- A listener that was held up for a whole period grants each peer another period. It does so once in
  each silence, so that a listener that is always late still finds a silent peer.

So a peer whose signs are less than ``limit_s`` apart, in counted time, is never reported. A peer
that has fallen silent is reported after at most ``2 * limit_s`` of counted time and two ticks.

Plain Python. ``now`` is monotonic, in seconds; each watch is owned by one thread.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

STANDSTILL_S = 60.0
"""Maximum standstill of a router or a whole host, in seconds. Peers and clients wait for it this
long if no other peer can do the work."""
_TICKS = 3
"""The minimum number of ticks before a silence reaches its limit."""

Peer = TypeVar("Peer", bound=Hashable)


@dataclass(slots=True)
class _Silence:
    sign: Hashable
    counted_s: float = 0.0
    was_extended: bool = False
    was_found: bool = False


class SilenceWatch(Generic[Peer]):
    """Finds silent peers by counting the listener's ticks; the module's docstring has the rules."""

    def __init__(self, limit_s: float) -> None:
        """Create a watch. A peer that gives no sign for ``limit_s`` seconds is silent."""
        self.limit_s = limit_s
        self._silences: dict[Peer, _Silence] = {}
        self._at: float | None = None

    def tick(self, signs: Mapping[Peer, Hashable], now: float) -> list[Peer]:
        """Count the time since the last tick. Return the peers that are found to be silent.

        ``signs`` has a value for each peer that should speak. A peer's value changes whenever the
        peer has spoken. A peer without a value is not silent. A peer that stays silent is returned
        again after another ``limit_s`` seconds.
        """
        passed = 0.0 if self._at is None else max(0.0, now - self._at)
        self._at = now
        counted = min(passed, self.limit_s / _TICKS)
        known, self._silences = self._silences, {}
        found = []
        for peer, sign in signs.items():
            silence = known.get(peer)
            if silence is None or silence.sign != sign:
                self._silences[peer] = _Silence(sign)
                continue
            self._silences[peer] = silence
            if passed >= self.limit_s and not silence.was_extended:
                silence.counted_s, silence.was_extended = 0.0, True
                continue
            if silence.counted_s >= self.limit_s:
                found.append(peer)
                silence.counted_s, silence.was_found = 0.0, True
            silence.counted_s += counted
        return found

    def is_silent(self, peer: Peer) -> bool:
        """Whether the peer was reported as silent, and has given no sign since."""
        silence = self._silences.get(peer)
        return silence is not None and silence.was_found
