"""Learns how many tokens per second batches get at full speed. ``now`` is passed in."""

from __future__ import annotations

import math
from dataclasses import dataclass

MIN_S = 10.0
"""Minimum length of a measurement, in seconds."""
MIN_LINES = 8
"""Minimum number of lines that end in a measurement."""
NEW_SHARE = 0.3
"""Weight of a new measurement against the earlier ones."""
BEHIND = 0.8
"""Paced batches that get less than this share of their pace get all of the slack that there is."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What the batches of a model have done since the table was made."""

    lines: int = 0
    tokens: int = 0
    """Tokens of prompts and answers."""
    tokens_per_s: float | None = None
    """The learned speed; None: not known."""


class Throughput:
    """Measures over the time in which batches run. Idle time does not count."""

    def __init__(self) -> None:
        self._last_at = 0.0
        self._last = Progress()
        self._last_asked = 0.0
        self._passed_s = 0.0
        self._lines = self._tokens = 0
        self._asked = math.inf
        """The lowest that was asked for in the measurement."""

    def observe(self, progress: Progress, asked: float, now: float) -> float | None:
        """Look again; returns the new speed in tokens per second if it has been learned just now.

        ``asked``: tokens per second that batches ask for at this moment, infinite at full speed, 0
        while none runs. ``now`` is monotonic, in seconds.
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
    """A rate at a lower pace is only a lower bound of the speed."""
    if known is None:
        return rate
    if not is_full:
        return max(known, rate)
    return (1 - NEW_SHARE) * known + NEW_SHARE * rate
