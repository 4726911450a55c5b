"""Learns how many tokens per second batches generate and read at full speed. ``now`` is passed
in."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_S = 10.0
"""Minimum length of a measurement, in seconds."""
MIN_LINES = 8
"""Minimum number of request lines of batches that must end during a measurement of their speed."""
NEW_SHARE = 0.3
"""Weight of a new measurement in the learned speed; the earlier ones have the rest."""
BEHIND = 0.8
"""Fraction of the requested rate. Batches that reach less than it already use all of the available
slack, so their rate counts as measured at full speed."""


@dataclass(frozen=True, slots=True)
class Progress:
    """The totals of a model's batches since the table was created."""

    lines: int = 0
    tokens: int = 0
    """Number of prompt and answer tokens of finished lines."""
    tokens_per_s: float | None = None
    """The learned speed at full speed, in tokens per second; None: not known."""


class Throughput:
    """Measures the tokens per second of batches while they run. Idle time does not count."""

    def __init__(self) -> None:
        self._last_at = 0.0
        self._last = Progress()
        self._last_asked = 0.0
        self._passed_s = 0.0
        self._lines = self._tokens = 0
        self._asked = math.inf
        """Lowest rate that batches requested during the current measurement, in tokens per
        second."""

    def observe(self, progress: Progress, asked: float, now: float) -> float | None:
        """Add an observation; return the new speed in tokens per second if one was just learned.

        ``asked``: tokens per second that batches currently request, infinite at full speed, 0 while
        none runs. ``now`` is monotonic, in seconds.
        """
        if self._last_asked > 0:
            self._passed_s += now - self._last_at
            self._lines += progress.lines - self._last.lines
            self._tokens += progress.tokens - self._last.tokens
            self._asked = min(self._asked, self._last_asked)
        self._last_at, self._last, self._last_asked = now, progress, asked
        if self._lines < MIN_LINES or self._passed_s < MIN_S:
            return None
        rate = self._tokens / self._passed_s
        is_full = self._asked == math.inf or rate < BEHIND * self._asked
        self._passed_s, self._lines, self._tokens, self._asked = 0.0, 0, 0, math.inf
        return _learned(progress.tokens_per_s, rate, is_full=is_full)


def _learned(known: float | None, rate: float, *, is_full: bool) -> float:
    """Combine a measured rate with the known speed. A rate that was not measured at full speed is
    only a lower bound."""
    if known is None:
        return rate
    if not is_full:
        return max(known, rate)
    return (1 - NEW_SHARE) * known + NEW_SHARE * rate
