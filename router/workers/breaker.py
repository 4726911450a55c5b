"""The circuit breaker of a worker. It counts the token streams of requests, from placement to their
end.

    closed ─streams break again and again→ open
    open ─its pause is over→ half open: one new stream each pause
    half open ─one of them ends well, or the first has lasted ``TRIAL_S``→ closed
    half open ─one of them breaks→ open, for twice as long

An answer that begins well and then breaks counts as broken. Streams that break within a moment
count as one break. Counts decay, so that old events do not matter. The states are those of M.
Nygard's circuit breaker ("Release It!", 2nd edition, 2018, chapter 5). Plain Python, ``now`` in
seconds of any one clock; owned by the router's event loop."""

from __future__ import annotations

from collections.abc import Callable

HALF_LIFE_S = 10.0
"""Half-life in seconds of the counts of streams, both of broken ones and of others."""
MAX_BREAKS = 2.5
"""The breaker opens above this decayed number of breaks: after three in quick succession."""
MIN_SHARE = 1 / 3
"""Minimum fraction of broken streams for the breaker to open, in addition to ``MAX_BREAKS``."""
DOUBTFUL = 0.25
"""Weight of a broken stream for which another worker may be at fault. Suppose a faulty worker
shares each break with a random other one, whose other streams end well. Then the fraction of broken
streams at that innocent worker is ``DOUBTFUL`` / (1 + ``DOUBTFUL``), a fifth. This is less than
``MIN_SHARE``, even at small counts."""
MOMENT_S = 0.25
"""Streams of a worker that break within this time, in seconds, count as one break."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 60.0
TRIAL_S = 10.0
"""A trial stream that has lasted this many seconds closes the breaker, since a whole answer may
take minutes."""


class Breaker:
    """The circuit breaker of one worker. It starts closed."""

    def __init__(self, on_change: Callable[[bool], None] = lambda _: None) -> None:
        """``on_change`` is called with whether the breaker is open, when it has opened and when it
        has closed."""
        self._on_change = on_change
        self.openings = 0
        """Number of times that the breaker has opened."""
        self._breaks = self._broken = self._whole = 0.0
        self._at: float | None = None
        self._broke_at = float("-inf")
        self._opened_at: float | None = None
        self._pause_s = FIRST_PAUSE_S
        self._next_trial = 0.0
        self._trial_at: float | None = None

    def is_closed(self, now: float) -> bool:
        """Return whether the breaker is closed, so that requests may go to the worker without
        limit."""
        if self._opened_at is None:
            return True
        return self._trial_at is not None and now - self._trial_at >= TRIAL_S

    def allows(self, now: float) -> bool:
        """Return whether the breaker allows a new stream to the worker."""
        return self.is_closed(now) or now >= self._next_trial

    def began(self, now: float) -> None:
        """Record that a new stream to the worker began."""
        self._let_trial_close(now)
        if not self.is_closed(now) and now >= self._next_trial:
            self._next_trial = now + self._pause_s
            if self._trial_at is None:
                self._trial_at = now

    def ended_well(self, began_at: float, now: float) -> None:
        """Record that a stream that began at ``began_at`` ended well."""
        self._fade(now)
        self._whole += 1.0
        if self._opened_at is not None and began_at > self._opened_at:
            self._close()

    def broke(self, now: float, streams: int = 1, *, doubtful: bool = False) -> None:
        """Record that ``streams`` streams of the worker broke, at least one. ``doubtful``: true if
        another worker may be at fault."""
        self._let_trial_close(now)
        self._fade(now)
        weight = DOUBTFUL if doubtful else 1.0
        self._broken += streams * weight
        if now - self._broke_at > MOMENT_S:
            self._breaks += 1.0
        self._broke_at = now
        if self._opened_at is not None:
            # Streams that were running when the breaker opened give no new evidence.
            if self._trial_at is not None:
                self._open(now, min(LONGEST_PAUSE_S, 2 * self._pause_s))
        elif self._breaks > MAX_BREAKS and self._share() >= MIN_SHARE:
            self._open(now, FIRST_PAUSE_S)

    def _share(self) -> float:
        return self._broken / (self._broken + self._whole)

    def _open(self, now: float, pause_s: float) -> None:
        self.openings += 1
        self._opened_at, self._trial_at = now, None
        self._pause_s = pause_s
        self._next_trial = now + pause_s
        self._on_change(True)

    def _let_trial_close(self, now: float) -> None:
        """Close the breaker if a trial stream has lasted long enough."""
        if self._opened_at is not None and self.is_closed(now):
            self._close()

    def _close(self) -> None:
        self._opened_at = self._trial_at = None
        self._pause_s = FIRST_PAUSE_S
        # The breaks that opened the breaker no longer count.
        self._breaks = self._broken = 0.0
        self._on_change(False)

    def _fade(self, now: float) -> None:
        if self._at is not None:
            kept = 0.5 ** (max(0.0, now - self._at) / HALF_LIFE_S)
            self._breaks *= kept
            self._broken *= kept
            self._whole *= kept
        self._at = now
