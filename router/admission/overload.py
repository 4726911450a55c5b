"""Overload control: what is rejected, probed and slowed down while more work arrives than can be
done.

``Overload`` decides whether more work arrives than the cluster can do, and which requests are
probes: they test the predictions by which others are rejected. ``PrefillPacer`` decides how fast
prompts are sent, so that running answers keep their pace.

Plain Python; ``now`` is passed in. Owned by one event loop.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable

MEMORY_S = 5.0
"""Time constant, in seconds, with which arrived work is forgotten."""
SUSTAINABLE = 0.8
"""While work arrives at less than this fraction of the cluster's speed, a queue is expected to
shorten by itself."""
PROBE_S = 1.0
"""Seconds between two probes while requests of a length (by power of two) are rejected as late."""
PROBE_SHARE = 0.1
"""Maximum fraction of a worker's time that probes of long prompts take."""
MAX_PROBE_S = 10.0
"""Maximum seconds between two probes, however long the probes are predicted to take."""


class Overload:
    """Detects whether more work arrives than the cluster can do, and picks the probes."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._answers = 0.0
        self._now = -math.inf
        self._refused_since: dict[int, float] = {}
        """Time of the first rejection since a request was last accepted, by length of the prompt
        (power of two)."""
        self._probes: dict[int, str] = {}
        """Request id of the probe that has no first token yet, by length of the prompt (power of
        two)."""

    def came(self, work_s: float, answers: int, now: float) -> None:
        """Count a request that has arrived, even if it is rejected later. ``answers``: the
        request's number of choices.

        ``work_s``: the seconds of prefill work that the request's prompt takes."""
        self._pass(now)
        self._work_s += work_s
        self._answers += answers

    def lasts(self, speed: float, answers_per_s: float, now: float) -> bool:
        """Return whether more work arrives than the cluster can do.

        ``speed`` of all prefill workers is in seconds of work per second; ``answers_per_s`` is the
        maximum rate at which decode workers end answers.
        """
        self._pass(now)
        prefill, decode = self._work_s / MEMORY_S, self._answers / MEMORY_S
        return prefill > SUSTAINABLE * speed or decode > SUSTAINABLE * answers_per_s

    def let_in(self, prompt_tokens: int) -> None:
        """Record that a request was accepted, so that no probe of the same length is needed."""
        self._refused_since.pop(prompt_tokens.bit_length(), None)

    def probes(self, request_id: str, prompt_tokens: int, own_s: float, now: float) -> bool:
        """Return whether a request that would be rejected as late is accepted as a probe.

        ``own_s`` is the predicted time in seconds that a worker takes for the request's prompt."""
        length = prompt_tokens.bit_length()
        since = self._refused_since.setdefault(length, now)
        every_s = min(MAX_PROBE_S, max(PROBE_S, own_s / PROBE_SHARE))
        if length in self._probes or now - since < every_s:
            return False
        self._probes[length] = request_id
        return True

    def is_probe(self, request_id: str) -> bool:
        """Return whether a request is a probe that has no first token yet."""
        return request_id in self._probes.values()

    def begun(self, request_id: str) -> None:
        """Record that a request has its first token or has ended. If it was a probe, another probe
        of the same length may follow."""
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
"""Prefill is never slowed down below this fraction of its full speed. If the TPOT SLO is missed
even then, slower prefill would not help."""
MISSES = 0.1
"""Fraction of answers that may miss the TPOT SLO."""
MAX_CALM_S = 40.0
"""Maximum seconds for which prefill stays slowed down after the last answer that missed the TPOT
SLO."""
SLACK_S = 0.1
"""If a prompt is sent later than the pace allows, its delay is made up for, up to this many
seconds."""
_STEP = 0.03


class PrefillPacer:
    """Slows prefill down until at most a fraction ``MISSES`` of the answers miss the TPOT SLO.

    Prefill takes time from decoding, by larger batches, and wherever both share cores or links. At
    a reduced pace, each prefill worker rests after a prompt, in proportion to its work. So one long
    prompt does not hold back prompts that other workers could compute.

    A quantile is tracked by stochastic approximation (H. Robbins and S. Monro, "A stochastic
    approximation method", Annals of Mathematical Statistics 22(3), 1951), in steps of the share's
    logarithm. Steps alone would need hundreds of answers to recover after a minute with too little
    decode capacity. So after the last miss, the pace stays reduced for no longer than the misses
    lasted. The share is constant in the first half of that time and rises to 1 in the second.
    """

    def __init__(self) -> None:
        self._share = 1.0
        self._since = self._until = -1e9
        """Start of the first slow answer of the current disturbance, and end of the last one. A new
        slow answer belongs to the same disturbance if it comes soon after prefill is back at full
        speed, or before any answer in time."""
        self._recovered = True
        """Whether the latest answer met the SLO."""
        self._now = -math.inf
        self._has_rests = False
        """Whether ``_rested_at`` has a time."""
        self._rested_at = [-math.inf]
        """A heap with one time for each prefill worker: when it has computed its prompts, and has
        rested after them."""

    @property
    def share(self) -> float:
        """Fraction of full speed at which prompts are sent. ``look`` updates it."""
        return self._share

    @property
    def _calm_s(self) -> float:
        """Seconds for which prefill stays slowed down after the last slow answer."""
        return min(MAX_CALM_S, max(0.0, self._until - self._since))

    def observe(self, *, in_time: bool, took_s: float, now: float) -> None:
        """Record an answer that took ``took_s`` seconds, and whether its TPOT met the SLO."""
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
        """Update ``share``, the fraction of full speed. Call this before ``share`` is read."""
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
            # The logarithm falls linearly to 0, independent of how often ``look`` is called.
            self._share **= (ends - now) / (ends - rises_from)

    def forget(self) -> None:
        """Return prefill to full speed. Call this when no sequence decodes, so that slower prefill
        would help no answer."""
        self._share, self._recovered = 1.0, True

    def served_by(self, workers: int) -> None:
        """Update the number of prefill workers."""
        if workers and workers != len(self._rested_at):
            kept = heapq.nlargest(workers, self._rested_at)
            self._rested_at = kept + [-math.inf] * (workers - len(kept))
            heapq.heapify(self._rested_at)

    def sent(self, own_s: float, now: float) -> None:
        """Record that a prompt was sent. One worker is predicted to compute it in ``own_s``
        seconds."""
        if self._share < 1.0:
            begins = max(now - SLACK_S, self._rested_at[0])
            heapq.heapreplace(self._rested_at, begins + own_s / self._share)
            self._has_rests = True
        elif self._has_rests:
            self._rested_at = [-math.inf] * len(self._rested_at)
            self._has_rests = False

    def wait_s(self, ahead_s: Iterable[float], now: float) -> float:
        """Return the seconds until a prompt may be sent; 0 if prefill is not slowed down.

        ``ahead_s``: for each prompt ahead, the seconds that a worker takes for it.
        """
        if self._share == 1.0:
            return 0.0
        rested_at = [max(now, at) for at in self._rested_at]
        heapq.heapify(rested_at)
        for own_s in ahead_s:
            heapq.heapreplace(rested_at, rested_at[0] + own_s / self._share)
        return rested_at[0] - now
