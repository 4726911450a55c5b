"""How fast prompts are sent, so that the tokens of running answers keep coming in time.

Prefill takes time from decoding: by larger batches, and where both share cores or links. Plain
Python; ``now`` is passed in.
"""

from __future__ import annotations

import math

MIN_SHARE = 0.5
"""Where the SLO is missed whatever is done, no more is given up for it."""
MISSES = 0.1
"""The share of answers that may miss the SLO."""
MAX_CALM_S = 40.0
"""After this long without a miss nothing is held back any more, however long misses went on."""
_STEP = 0.03


class Pace:
    """A share of the drain rate at which just ``MISSES`` of the answers come too slowly.

    A quantile is tracked by stochastic approximation (H. Robbins and S. Monro, "A stochastic
    approximation method", Annals of Mathematical Statistics 22(3), 1951), in steps of the share's
    logarithm. By these alone it would take hundreds of answers to forget a decode side that was too
    small for a minute: so after the last miss nothing is held back for longer than misses went on.
    The share stays for the first half of that time and rises to 1 in the second.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._since = self._until = -1e9
        """When the first slow answer of this disturbance began, and the last one ended. One that
        comes soon after prompts are no longer held back belongs to the same disturbance, and so
        does one that comes before any in time."""
        self._recovered = True
        """Whether the last answer was in time."""
        self._now = -math.inf

    @property
    def share(self) -> float:
        """As of the last ``look``."""
        return self._share

    @property
    def _calm_s(self) -> float:
        """Seconds after the last miss for which prompts are held back."""
        return min(MAX_CALM_S, max(0.0, self._until - self._since))

    def heard(self, *, in_time: bool, took_s: float, now: float) -> None:
        """Note an answer that took ``took_s`` seconds; its time per token met the SLO or not."""
        self.look(now)
        step = MISSES
        if not in_time:
            if self._recovered and now - took_s > self._until + 2 * self._calm_s:
                self._since = now - took_s
            self._until = now
            step = MISSES - 1.0
        self._recovered = in_time
        self._share = min(1.0, max(MIN_SHARE, self._share * math.exp(_STEP * step)))

    def look(self, now: float) -> None:
        """Before the share is asked for."""
        before, self._now = self._now, max(now, self._now)
        if self._share == 1.0:
            return
        calm_s = self._calm_s
        ends = self._until + calm_s
        if now >= ends:
            self.forget()
            return
        rises_from = max(before, ends - calm_s / 2)
        if now > rises_from:
            # The logarithm falls to 0 in a straight line, however often it is looked at.
            self._share **= (ends - now) / (ends - rises_from)

    def forget(self) -> None:
        """Hold nothing back: nothing decodes, so that no answer would gain from it."""
        self._share = 1.0
