"""How fast prompts are sent, so that the tokens of running answers keep coming in time.

Prefill takes time from decoding: by larger batches, and where both share cores or links. At a
reduced pace each prefill worker rests after a prompt, in proportion to its work: one long prompt
does not hold back those that other workers could compute. Plain Python; ``now`` is passed in.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

MIN_SHARE = 0.5
"""Where the SLO is missed whatever is done, no more is given up for it."""
MISSES = 0.1
"""The share of answers that may miss the SLO."""
MAX_CALM_S = 40.0
"""After this long without a miss nothing is held back any more, however long misses went on."""
SLACK_S = 0.1
"""A turn that was taken late, because no event came at its time, is made up for this far."""
_STEP = 0.03


class PrefillPacer:
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
        """Start of the first slow answer of this disturbance, and end of the last one. A miss soon
        after the pace is back to normal, or before any answer in time, belongs to the same
        disturbance."""
        self._recovered = True
        """Whether the last answer was in time."""
        self._now = -math.inf
        self._rested_at = [-math.inf]
        """A heap: when each prefill worker has computed its prompts and rested after them."""

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
            self._share = 1.0
            return
        rises_from = max(before, ends - calm_s / 2)
        if now > rises_from:
            # The logarithm falls to 0 in a straight line, however often it is looked at.
            self._share **= (ends - now) / (ends - rises_from)

    def forget(self) -> None:
        """Reset: nothing decodes, so no answer would gain from a lower pace."""
        self._share, self._recovered = 1.0, True

    def served_by(self, workers: int) -> None:
        """Take in how many prefill workers there are."""
        if workers and workers != len(self._rested_at):
            kept = heapq.nlargest(workers, self._rested_at)
            self._rested_at = kept + [-math.inf] * (workers - len(kept))
            heapq.heapify(self._rested_at)

    def sent(self, own_s: float, now: float) -> None:
        """Note a prompt that one worker computes in ``own_s`` seconds."""
        if self._share < 1.0:
            begins = max(now - SLACK_S, self._rested_at[0])
            heapq.heapreplace(self._rested_at, begins + own_s / self._share)
        else:
            self._rested_at = [-math.inf] * len(self._rested_at)

    def wait_s(self, ahead_s: Iterable[float], now: float) -> float:
        """Seconds until a prompt may be sent; 0 where the pace is not reduced.

        ``ahead_s`` are the seconds that one worker takes for each prompt that goes before it.
        """
        if self._share == 1.0:
            return 0.0
        rested_at = [max(now, at) for at in self._rested_at]
        heapq.heapify(rested_at)
        for own_s in ahead_s:
            heapq.heapreplace(rested_at, rested_at[0] + own_s / self._share)
        return rested_at[0] - now
