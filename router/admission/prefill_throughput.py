"""How fast the cluster finishes prompts, learned while requests wait for it.

A prompt's work is the seconds that the cost model predicts for it. The speed is work per second:
the number of workers where the model is right.

A prompt counts for the part of its stay at the workers in which requests waited, as if it were
computed evenly from its sending to its first token: by Little's law the work that stays there,
each over its stay, are what is finished in a second. Counting a whole prompt when it ends would be
right in the long run, but waiting comes in short pieces: requests that come together fill every
worker at once, and the first one to end ends the waiting, with the others' work unseen.

How much of a prompt under way is done is not known. When one ends, the others count as half done;
until the next one ends the rate stays as it is, unless it is certain to be wrong: it is at least
what none of the prompts under way adds to, and at most what all of them do.

Only waiting teaches, and a refused request does not wait: so what was learned also fades while
nothing waits, and an idle cluster's is forgotten. The cost model then takes over.

Plain Python; ``now`` is passed in.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 15.0
"""Saturated seconds after which what was seen counts 1/e: prompts and machines change."""
QUIET_MEMORY_S = 5.0
"""The same for seconds in which no request waits: the cost model takes over, which every prompt
corrects."""
IDLE_S = 5.0
"""An idle cluster in which no request has waited for this long is as one that was never seen."""
ENOUGH_S = 0.5
"""Saturated seconds before the rate is believed; then it is until they have faded."""
FADED_S = 0.1
"""Saturated seconds that are still remembered below which it is not believed any more."""
MIN_SPEED = 1e-3
"""However long a cluster stands still: times are divided by the rate."""


@dataclass(frozen=True, slots=True)
class Sample:
    """A prompt at the workers."""

    work_s: float
    since: float
    """When it was sent."""
    saturated_s: float
    """Saturated seconds of the router's life until then."""


class PrefillThroughput:
    """Work per second, cached tokens counted as if computed, of all prefill workers together.

    Only time in which requests waited counts: what an idle cluster finishes says nothing of what
    it could.
    """

    def __init__(self) -> None:
        self._work_s = 0.0
        """Finished in the saturated seconds that are remembered."""
        self._seconds = 0.0
        """These seconds."""
        self._saturated_s = 0.0
        """All saturated seconds."""
        self._saturated = False
        self._now = 0.0
        # Sums over those that stay, so that nothing is done for each of them.
        self._stays_count = 0
        self._staying = 0.0
        self._since = 0.0
        self._workers = 0
        self._since_saturated_s = 0.0
        self._waited_at = 0.0
        """When a request waited last."""
        self._estimate: float | None = None
        """As of the last end of a prompt."""

    @property
    def evidence_s(self) -> float:
        """Saturated seconds that are still remembered."""
        return self._seconds

    @property
    def speed(self) -> float | None:
        """None while too little was seen, or nothing lately."""
        if self._estimate is None or self._seconds < FADED_S:
            return None
        lower = self._work_s / self._seconds
        upper = (self._work_s + self._unfinished()) / self._seconds
        return max(MIN_SPEED, min(upper, max(lower, self._estimate)))

    def served_by(self, workers: int) -> None:
        """So many prefill workers there are now: what was learned of fewer, or more, is theirs.

        It would not be learned otherwise: where too low a rate turns all away, no request waits.
        """
        if self._workers and workers:
            self._work_s *= workers / self._workers
            if self._estimate is not None:
                self._estimate *= workers / self._workers
        self._workers = workers or self._workers

    def look(self, now: float) -> None:
        """Before the rate is asked for: an idle cluster's is forgotten in time."""
        self._pass(now)
        if not self._saturated and not self._stays_count and now - self._waited_at >= IDLE_S:
            self._work_s = self._seconds = 0.0
        if self._seconds < FADED_S:
            self._estimate = None

    def saturated(self, now: float, *, waiting: bool) -> None:
        """From ``now`` on, requests wait for the prefill workers, or none does."""
        self._pass(now)
        self._saturated = waiting
        if self._estimate is None:
            self._judge()

    def sent(self, work_s: float, now: float) -> Sample:
        """A prompt goes to the workers. ``finished`` or ``left`` is to follow, once."""
        self._pass(now)
        stay = Sample(work_s, now, self._saturated_s)
        self._stays(stay, 1)
        return stay

    def finished(self, stay: Sample, now: float) -> None:
        """It has its first token."""
        self._pass(now)
        self._stays(stay, -1)
        overlap_s = self._saturated_s - stay.saturated_s
        self._work_s += self._credit(stay.work_s, overlap_s, now - stay.since)
        self._judge()

    def left(self, stay: Sample) -> None:
        """It has gone without one."""
        self._stays(stay, -1)

    def _stays(self, stay: Sample, count: int) -> None:
        work_s = count * stay.work_s
        self._stays_count += count
        if self._stays_count:
            self._staying += work_s
            self._since += work_s * stay.since
            self._since_saturated_s += work_s * stay.saturated_s
        else:
            # Sums of many numbers: their rounding ends here.
            self._staying = self._since = self._since_saturated_s = 0.0

    def _judge(self) -> None:
        """A prompt has ended: of those that have not, half is done on average."""
        enough_s = ENOUGH_S if self._estimate is None else FADED_S
        if self._seconds >= enough_s and self._work_s > 0:
            self._estimate = (self._work_s + self._unfinished() / 2) / self._seconds

    def _unfinished(self) -> float:
        """What all that stay would count for, were they done; by the means of their times."""
        if not self._stays_count:
            return 0.0
        overlap_s = self._saturated_s - self._since_saturated_s / self._staying
        stay_s = self._now - self._since / self._staying
        return self._credit(self._staying, overlap_s, stay_s)

    def _credit(self, work_s: float, overlap_s: float, stay_s: float) -> float:
        """Of the work, that of the saturated part of the stay that is still remembered."""
        if stay_s <= 0:
            return work_s if self._saturated else 0.0
        share = min(1.0, max(0.0, overlap_s / stay_s))
        if share == 0.0:
            return 0.0
        memory = overlap_s / MEMORY_S
        quiet = (self._now - self._waited_at) / QUIET_MEMORY_S
        return work_s * share * -math.expm1(-memory) / memory * math.exp(-quiet)

    def _pass(self, now: float) -> None:
        elapsed, self._now = max(0.0, now - self._now), now
        if self._saturated:
            self._waited_at = self._now
            kept = math.exp(-elapsed / MEMORY_S)
            self._work_s *= kept
            # The integral of what is forgotten meanwhile, so that a steady rate stays itself.
            self._seconds = self._seconds * kept + MEMORY_S * (1 - kept)
            self._saturated_s += elapsed
        else:
            kept = math.exp(-elapsed / QUIET_MEMORY_S)
            self._work_s *= kept
            self._seconds *= kept
