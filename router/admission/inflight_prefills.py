"""The prompts that were sent to the prefill workers: what is left of them, and when one is free.

Each worker computes one prompt at a time, in the order of their sending, at its share of the speed
of all. The cost model says how long one worker computes a prompt; how fast all of them finish work
is learned while requests wait (``PrefillThroughput``), since other work shares their cores and
caches save some. What was learned is weighed against the model by how much of it there is: it fades
within seconds of other traffic, and an idle cluster has the model alone.

Work is in seconds, speed is work per second. Plain Python; ``now`` is passed in. Owned by one event
loop.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Set
from dataclasses import dataclass
from itertools import chain

from router.admission.capacity import IDLE_S, Capacity

MEMORY_S = 15.0
"""Saturated seconds after which what was seen counts 1/e: prompts and machines change."""
QUIET_MEMORY_S = 5.0
"""The same for seconds in which no request waits: the cost model takes over, which every prompt
corrects."""
ENOUGH_S = 0.5
"""Saturated seconds before the rate is believed; then it is until they have faded."""
FADED_S = 0.1
"""Saturated seconds that are still remembered below which it is not believed any more."""
MIN_SPEED = 1e-3
"""However long a cluster stands still: times are divided by the rate."""


@dataclass(slots=True)
class InflightPrompt:
    """A prompt at the workers."""

    tokens: int
    work_s: float
    sent_at: float
    saturated_s: float
    """Saturated seconds of the router's life until it was sent."""
    began_at: float | None = None
    """When a worker took it up; None: all workers had other prompts."""

    def left(self, worker_speed: float, now: float) -> float:
        """Work that is still to be done, as far as is known."""
        if self.began_at is None:
            return self.work_s
        return max(0.0, self.work_s - worker_speed * (now - self.began_at))


class PrefillThroughput:
    """How fast the cluster finishes prompts, learned while requests wait for it.

    A prompt's work is the seconds that the cost model predicts for it. The speed is work per
    second: the number of workers where the model is right. Cached tokens count as if computed.

    A prompt counts for the part of its stay at the workers in which requests waited, as if it were
    computed evenly from its sending to its first token: by Little's law the work that stays there,
    each over its stay, are what is finished in a second. Counting a whole prompt when it ends would
    be right in the long run, but waiting comes in short pieces: requests that come together fill
    every worker at once, and the first one to end ends the waiting, with the others' work unseen.

    How much of a prompt under way is done is not known. When one ends, the others count as half
    done; until the next one ends the rate stays as it is, unless it is certain to be wrong: it is
    at least what none of the prompts under way adds to, and at most what all of them do.

    Only waiting teaches, and a refused request does not wait: so what was learned also fades while
    nothing waits, and an idle cluster's is forgotten. The cost model then takes over.
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

    def sent(self, tokens: int, work_s: float, now: float) -> InflightPrompt:
        """A prompt goes to the workers. ``finished`` or ``left`` is to follow, once."""
        self._pass(now)
        stay = InflightPrompt(tokens, work_s, now, self._saturated_s)
        self._stays(stay, 1)
        return stay

    def finished(self, stay: InflightPrompt, now: float) -> None:
        """It has its first token."""
        self._pass(now)
        self._stays(stay, -1)
        overlap_s = self._saturated_s - stay.saturated_s
        self._work_s += self._credit(stay.work_s, overlap_s, now - stay.sent_at)
        self._judge()

    def left(self, stay: InflightPrompt) -> None:
        """It has gone without one."""
        self._stays(stay, -1)

    def _stays(self, stay: InflightPrompt, count: int) -> None:
        work_s = count * stay.work_s
        self._stays_count += count
        if self._stays_count:
            self._staying += work_s
            self._since += work_s * stay.sent_at
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


MODEL_EVIDENCE_S = 0.5
"""The cost model counts as this many seconds of what was learned."""
WINDOW_S = 0.25
"""Seconds of work that wait at each prefill worker: one step runs, the next one is ready."""
MIN_WINDOW_TOKENS = 1024
"""Minimum of prompt tokens that wait there as well: two chunks of a CPU's prefill."""


class InflightPrefills:
    """Prompts between their sending and their first token."""

    def __init__(self) -> None:
        self._throughput = PrefillThroughput()
        self._prompts: dict[str, InflightPrompt] = {}
        """In the order of their sending."""
        self._queued: dict[str, InflightPrompt] = {}
        """Those of them that no worker has taken up."""
        self._workers = 1
        self._tokens = 0
        self._work_s = 0.0

    def look(self, capacity: Capacity, now: float) -> None:
        """Take in how many workers there are."""
        self._throughput.look(now)
        self._workers = max(1, capacity.prefill_workers)
        self._take_up(now)
        self._throughput.served_by(capacity.prefill_workers)

    @property
    def speed(self) -> float:
        """Work that all workers do in a second, in seconds; above 0."""
        model, learned = float(self._workers), self._throughput.speed
        if learned is None:
            return model
        evidence_s = self._throughput.evidence_s
        total_s = evidence_s + MODEL_EVIDENCE_S
        return (learned * evidence_s + model * MODEL_EVIDENCE_S) / total_s

    @property
    def learned_speed(self) -> float | None:
        """The speed that was seen lately, without the model; None: nothing was seen."""
        return self._throughput.speed

    @property
    def prompts(self) -> Set[str]:
        """The ids of their requests."""
        return self._prompts.keys()

    @property
    def tokens(self) -> int:
        """Tokens of all prompts."""
        return self._tokens

    @property
    def work_s(self) -> float:
        """Seconds of work of all prompts, including what is done already."""
        return self._work_s

    def own_s(self, work_s: float) -> float:
        """Seconds in which one worker does ``work_s`` of work."""
        return work_s * self._workers / self.speed

    def free_after_s(self, ahead_s: Iterable[float], now: float) -> float:
        """Seconds until a worker takes up a prompt behind others with ``ahead_s`` of work each."""
        each = self.speed / self._workers
        begun = [one.left(each, now) for one in self._prompts.values() if one.began_at is not None]
        left = [0.0] * (self._workers - len(begun)) + begun
        heapq.heapify(left)
        for work_s in chain((one.work_s for one in self._queued.values()), ahead_s):
            heapq.heapreplace(left, left[0] + work_s)
        return left[0] / each

    def is_full(self, capacity: Capacity) -> bool:
        """Whether the workers have enough to do: each a prompt, and the window's work.

        By work alone one long prompt, which a single worker computes, would keep the others idle.
        """
        if len(self._prompts) < capacity.prefill_workers:
            return False
        if self._tokens < MIN_WINDOW_TOKENS * capacity.prefill_workers:
            return False
        return self._work_s >= WINDOW_S * self.speed

    def takes(self, more_s: float) -> float:
        """Seconds that all workers take for what they have, and ``more_s`` of work."""
        return (self._work_s + more_s) / self.speed

    def saturated(self, now: float, *, waiting: bool) -> None:
        """From ``now`` on, requests wait for the prefill workers, or none does."""
        self._throughput.saturated(now, waiting=waiting)

    def sent(self, request_id: str, tokens: int, work_s: float, now: float) -> None:
        """Note a prompt that goes to the workers. ``finished`` or ``left`` must follow, once."""
        prompt = self._throughput.sent(tokens, work_s, now)
        self._prompts[request_id] = self._queued[request_id] = prompt
        self._tokens += tokens
        self._work_s += work_s
        self._take_up(now)

    def finished(self, request_id: str, now: float) -> None:
        """Note its first token. Raises KeyError for one that was not sent, or has gone."""
        self._throughput.finished(self._remove(request_id, now), now)

    def left(self, request_id: str, now: float) -> None:
        """Note that it has gone, if it has no first token; idempotent."""
        if request_id in self._prompts:
            self._throughput.left(self._remove(request_id, now))

    def _remove(self, request_id: str, now: float) -> InflightPrompt:
        gone = self._prompts.pop(request_id)
        self._tokens -= gone.tokens
        # A sum of many numbers: its rounding ends where none is left.
        self._work_s = self._work_s - gone.work_s if self._prompts else 0.0
        self._queued.pop(request_id, None)
        self._take_up(now)
        return gone

    def _take_up(self, now: float) -> None:
        free = self._workers - (len(self._prompts) - len(self._queued))
        while free > 0 and self._queued:
            first = next(iter(self._queued))
            self._queued.pop(first).began_at = now
            free -= 1
