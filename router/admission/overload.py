"""Overload control: what is refused, tested and slowed down while more comes than can be done.

``Overload`` tells whether more work arrives than the cluster can do, and which requests test the
predictions by which others are refused: probes. ``PrefillPacer`` tells how fast prompts are sent,
so that the tokens of running answers keep coming in time.

Plain Python; ``now`` is passed in. Owned by one event loop.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

MEMORY_S = 5.0
"""Work that came this many seconds ago counts 1/e."""
SUSTAINABLE = 0.8
"""Up to this share of what can be done a queue shortens by itself."""
PROBE_S = 1.0
"""Seconds between two probes while requests of a length (by power of two) are refused for time."""
PROBE_SHARE = 0.1
"""The maximum share of a worker's time that probes of long prompts take."""
MAX_PROBE_S = 10.0
"""The maximum of seconds between two probes, whatever time they are predicted to take."""


class Overload:
    """Work that arrives, and the probes among it."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._answers = 0.0
        self._now = -math.inf
        self._refused_since: dict[int, float] = {}
        """By power of two of prompt tokens: the first refusal since one was last accepted."""
        self._probes: dict[int, str] = {}
        """By the same, the probe that has no first token yet."""

    def came(self, work_s: float, answers: int, now: float) -> None:
        """Count an offered request, even if refused: its answers are drawn from one prompt.

        The prompt takes ``work_s`` seconds of prefill work.
        """
        self._pass(now)
        self._work_s += work_s
        self._answers += answers

    def lasts(self, speed: float, answers_per_s: float, now: float) -> bool:
        """Whether more work arrives than the cluster can do.

        ``speed`` of all prefill workers is in seconds of work per second; ``answers_per_s`` is the
        maximum rate at which decode workers end answers.
        """
        self._pass(now)
        prefill, decode = self._work_s / MEMORY_S, self._answers / MEMORY_S
        return prefill > SUSTAINABLE * speed or decode > SUSTAINABLE * answers_per_s

    def let_in(self, prompt_tokens: int) -> None:
        """Note an accepted request: predictions for its length are up to date."""
        self._refused_since.pop(prompt_tokens.bit_length(), None)

    def probes(self, request_id: str, prompt_tokens: int, own_s: float, now: float) -> bool:
        """Whether a request that would be refused for time is accepted as a probe.

        ``own_s`` is the predicted time in seconds that a worker takes for its prompt.
        """
        length = prompt_tokens.bit_length()
        since = self._refused_since.setdefault(length, now)
        every_s = min(MAX_PROBE_S, max(PROBE_S, own_s / PROBE_SHARE))
        if length in self._probes or now - since < every_s:
            return False
        self._probes[length] = request_id
        return True

    def is_probe(self, request_id: str) -> bool:
        """Whether it is a probe that has no first token yet."""
        return request_id in self._probes.values()

    def begun(self, request_id: str) -> None:
        """Note that it has its first token, or has gone."""
        if self.is_probe(request_id):
            self._probes = {
                length: probe for length, probe in self._probes.items() if probe != request_id
            }

    def _pass(self, now: float) -> None:
        if now > self._now:
            kept = math.exp((self._now - now) / MEMORY_S)
            self._work_s *= kept
            self._answers *= kept
            self._now = now


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

    Prefill takes time from decoding: by larger batches, and where both share cores or links. At a
    reduced pace each prefill worker rests after a prompt, in proportion to its work: one long
    prompt does not hold back those that other workers could compute.

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
