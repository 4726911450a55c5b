"""How fast prompts are passed on, so that the tokens of those who were let in keep coming in time.

Prefill takes time from decoding: by larger batches, and where both share cores or links. Plain
Python; ``now`` is passed in.
"""

from __future__ import annotations

import math

LEAST_SHARE = 0.5
"""Where the SLO is missed whatever is done, no more is given up for it."""
MISSES = 0.1
"""The share of answers that may miss the SLO."""
CALM_ANSWERS = 60
"""So many in time on end are no chance: the share then rises ``_FAST`` times as fast."""
CALM_S = 20.0
"""After so many seconds without a miss what was learned fades, by 1/e in as many."""
_STEP = 0.03
_FAST = 10.0


class Pace:
    """A share of the drain rate at which just ``MISSES`` of the answers come too slowly.

    A quantile is tracked by stochastic approximation (H. Robbins and S. Monro, "A stochastic
    approximation method", Annals of Mathematical Statistics 22(3), 1951), in steps of the share's
    logarithm. By these alone it would take hundreds of answers to forget a decode side that was too
    small for a minute.
    """

    def __init__(self) -> None:
        self.share = 1.0
        """Read only."""
        self._in_time = 0
        """Answers since the last miss."""
        self._missed_at = -math.inf
        self._now = -math.inf

    def heard(self, *, in_time: bool, now: float) -> None:
        """An answer has ended, and its time per token met the SLO or missed it."""
        self.look(now)
        if in_time:
            self._in_time += 1
            step = MISSES * (_FAST if self._in_time > CALM_ANSWERS else 1.0)
        else:
            self._in_time, self._missed_at = 0, now
            step = MISSES - 1.0
        self.share = min(1.0, max(LEAST_SHARE, self.share * math.exp(_STEP * step)))

    def look(self, now: float) -> None:
        """Before the share is asked for."""
        calm_s = now - max(self._now, self._missed_at + CALM_S)
        if self.share < 1.0 and calm_s > 0:
            self.share **= math.exp(-calm_s / CALM_S)
        self._now = max(now, self._now)

    def forget(self) -> None:
        """Nobody decodes: there is nobody to hold prompts back for."""
        self.share, self._in_time = 1.0, 0
