"""The prompts at the prefill workers: the work that is left, and when a worker is free.

Each worker computes one prompt at a time, in the order of sending, at its share of the total speed.
The cost model predicts the time of one prompt on one worker. ``PrefillThroughput`` learns the speed
of all workers while requests wait, since other work shares their cores and caches save work. The
learned speed is weighted against the model by the amount of evidence. That fades within seconds of
other traffic, and an idle cluster uses the model alone.

Work is in seconds, speed is work per second. Plain Python; ``now`` is passed in. Owned by one event
loop.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence, Set
from dataclasses import dataclass
from itertools import chain

from router.admission.capacity import IDLE_S, Capacity

MEMORY_S = 15.0
"""Time constant in seconds with which the learned speed is forgotten while requests wait: prompts
and machines change."""
QUIET_MEMORY_S = 5.0
"""Time constant in seconds with which the learned speed is forgotten while no request waits. The
cost model takes over, which every prompt corrects."""
ENOUGH_S = 0.5
"""The learned speed is trusted once this many remembered seconds had waiting requests. It stays
trusted until fewer than ``FADED_S`` are left."""
FADED_S = 0.1
"""The learned speed is no longer trusted if fewer seconds with waiting requests than this are
remembered."""
MIN_SPEED = 1e-3
"""Minimum value of a speed, since times are divided by it. It applies even to an idle cluster."""


@dataclass(slots=True)
class InflightPrompt:
    """A prompt at the prefill workers that has no first token yet."""

    tokens: int
    work_s: float
    sent_at: float
    saturated_s: float
    """Total seconds in which requests had waited at this router when the prompt was sent."""
    began_at: float | None = None
    """Time at which a worker presumably started on the prompt; None while all workers have other
    prompts."""

    def left(self, worker_speed: float, now: float) -> float:
        """Return the estimated work that remains on the prompt, in seconds by the cost model."""
        if self.began_at is None:
            return self.work_s
        return max(0.0, self.work_s - worker_speed * (now - self.began_at))


class PrefillThroughput:
    """Learns how fast the cluster finishes prompts, from the times in which requests wait for it.

    A prompt's work is the seconds that the cost model predicts for it. The speed is work per
    second: the number of workers if the model is right. Cached tokens count as computed.

    A prompt counts for the part of its stay at the workers in which requests waited, as if it were
    computed evenly from its sending to its first token. By Little's law, the work in flight, each
    divided by its stay, is the work finished per second. Counting a whole prompt at its end would
    be right in the long run, but waiting comes in short periods. Requests that arrive together fill
    every worker at once. The first one to end stops the waiting, and the work of the others would
    not be counted.

    The progress of a prompt in flight is not known. When one ends, the others count as half done.
    Until the next one ends, the rate stays unless it is certainly wrong. Its lower bound counts
    none of the work in flight, its upper bound all of it.

    Only waiting teaches, and a rejected request does not wait. So learned values also fade while
    nothing waits, and an idle cluster drops them. The cost model then takes over.
    """

    def __init__(self) -> None:
        self._work_s = 0.0
        """Work that the workers finished while requests waited, in seconds by the cost model. Older
        work counts less."""
        self._seconds = 0.0
        """Number of seconds in which requests waited. Older seconds count less."""
        self._saturated_s = 0.0
        """Total number of seconds so far in which requests waited."""
        self._saturated = False
        self._now = 0.0
        # Sums over the prompts in flight avoid a loop over each of them.
        self._stays_count = 0
        self._staying = 0.0
        self._since = 0.0
        self._workers = 0
        self._since_saturated_s = 0.0
        self._waited_at = 0.0
        """Time at which a request last waited."""
        self._estimate: float | None = None
        """Speed of all prefill workers, as estimated when a prompt last ended; None if it is not
        known."""

    @property
    def evidence_s(self) -> float:
        """Evidence for the learned speed: number of seconds in which requests waited, where older
        seconds count less."""
        return self._seconds

    @property
    def speed(self) -> float | None:
        """Learned speed of all prefill workers together; None if too little was measured or the
        measurements are too old."""
        if self._estimate is None or self._seconds < FADED_S:
            return None
        lower = self._work_s / self._seconds
        upper = (self._work_s + self._unfinished()) / self._seconds
        return max(MIN_SPEED, min(upper, max(lower, self._estimate)))

    def served_by(self, workers: int) -> None:
        """Scale the learned speed to a new number of prefill workers.

        Otherwise a speed that is too low could persist: if every request is rejected, none waits,
        and no speed is measured."""
        if self._workers and workers:
            self._work_s *= workers / self._workers
            if self._estimate is not None:
                self._estimate *= workers / self._workers
        self._workers = workers or self._workers

    def look(self, now: float) -> None:
        """Drop the learned speed if the cluster is idle. Call this before ``speed`` is read."""
        self._pass(now)
        if not self._saturated and not self._stays_count and now - self._waited_at >= IDLE_S:
            self._work_s = self._seconds = 0.0
        if self._seconds < FADED_S:
            self._estimate = None

    def saturated(self, now: float, *, waiting: bool) -> None:
        """Record whether requests wait for the prefill workers from ``now`` on."""
        self._pass(now)
        self._saturated = waiting
        if self._estimate is None:
            self._judge()

    def sent(self, tokens: int, work_s: float, now: float) -> InflightPrompt:
        """Record that a prompt was sent to the workers. Afterwards the caller must call either
        ``finished`` or ``left`` once."""
        self._pass(now)
        stay = InflightPrompt(tokens, work_s, now, self._saturated_s)
        self._stays(stay, 1)
        return stay

    def finished(self, stay: InflightPrompt, now: float) -> None:
        """Record that a prompt has its first token."""
        self._pass(now)
        self._stays(stay, -1)
        overlap_s = self._saturated_s - stay.saturated_s
        self._work_s += self._credit(stay.work_s, overlap_s, now - stay.sent_at)
        self._judge()

    def left(self, stay: InflightPrompt) -> None:
        """Record that a prompt has ended without a first token."""
        self._stays(stay, -1)

    def _stays(self, stay: InflightPrompt, count: int) -> None:
        work_s = count * stay.work_s
        self._stays_count += count
        if self._stays_count:
            self._staying += work_s
            self._since += work_s * stay.sent_at
            self._since_saturated_s += work_s * stay.saturated_s
        else:
            # Reset the sums, so that rounding errors do not accumulate.
            self._staying = self._since = self._since_saturated_s = 0.0

    def _judge(self) -> None:
        """Estimate the speed at the end of a prompt. The other prompts in flight count as half
        done."""
        enough_s = ENOUGH_S if self._estimate is None else FADED_S
        if self._seconds >= enough_s and self._work_s > 0:
            self._estimate = (self._work_s + self._unfinished() / 2) / self._seconds

    def _unfinished(self) -> float:
        """Return the work that would be credited if all prompts in flight ended now. It is computed
        from the means of their times."""
        if not self._stays_count:
            return 0.0
        overlap_s = self._saturated_s - self._since_saturated_s / self._staying
        stay_s = self._now - self._since / self._staying
        return self._credit(self._staying, overlap_s, stay_s)

    def _credit(self, work_s: float, overlap_s: float, stay_s: float) -> float:
        """Return how much of a prompt's work counts for the learned speed. Only work done while
        requests waited counts, weighted by age."""
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
            # The integral of the decay over the elapsed time keeps a steady rate constant.
            self._seconds = self._seconds * kept + MEMORY_S * (1 - kept)
            self._saturated_s += elapsed
        else:
            kept = math.exp(-elapsed / QUIET_MEMORY_S)
            self._work_s *= kept
            self._seconds *= kept


MODEL_EVIDENCE_S = 0.5
"""Weight of the cost model against the learned speed, in seconds of evidence."""
WINDOW_S = 0.25
"""Seconds of work that admission keeps queued at each prefill worker: one step runs, the next one
is ready."""
MIN_WINDOW_TOKENS = 1024
"""Minimum number of prompt tokens that admission keeps queued at each prefill worker: two chunks of
a CPU's prefill."""


class InflightPrefills:
    """The prompts that were sent to prefill workers and have no first token yet."""

    def __init__(self) -> None:
        self._throughput = PrefillThroughput()
        self._prompts: dict[str, InflightPrompt] = {}
        """All prompts by request id, in the order of sending."""
        self._queued: dict[str, InflightPrompt] = {}
        """Prompts that no worker is presumed to have started, by request id."""
        self._workers = 1
        self._tokens = 0
        self._work_s = 0.0

    def look(self, capacity: Capacity, now: float) -> None:
        """Update the number of prefill workers, and drop the learned speed if the cluster is
        idle.
        """
        self._throughput.look(now)
        self._workers = max(1, capacity.prefill_workers)
        self._take_up(now)
        self._throughput.served_by(capacity.prefill_workers)

    @property
    def speed(self) -> float:
        """Predicted seconds of work that all prefill workers do per second; above 0."""
        model, learned = float(self._workers), self._throughput.speed
        if learned is None:
            return model
        evidence_s = self._throughput.evidence_s
        total_s = evidence_s + MODEL_EVIDENCE_S
        return (learned * evidence_s + model * MODEL_EVIDENCE_S) / total_s

    @property
    def learned_speed(self) -> float | None:
        """Measured speed of all prefill workers together, without the cost model. None if the
        measurements are too old."""
        return self._throughput.speed

    @property
    def prompts(self) -> Set[str]:
        """Ids of the requests whose prompts are at the prefill workers."""
        return self._prompts.keys()

    @property
    def tokens(self) -> int:
        """Number of tokens of all prompts at the prefill workers."""
        return self._tokens

    @property
    def work_s(self) -> float:
        """Work of all prompts at the prefill workers in seconds, including the part that is already
        done.
        """
        return self._work_s

    def own_s(self, work_s: float) -> float:
        """Return the seconds that one worker takes at its actual speed for ``work_s`` seconds of
        work by the cost model."""
        return work_s * self._workers / self.speed

    def free_after_s(self, ahead_s: Sequence[float], now: float) -> float:
        """Return the seconds until a worker is free for a further prompt. Before it come the queued
        prompts and those of ``ahead_s``.

        ``ahead_s``: the work of each prompt that is not sent yet but goes first, in seconds by the
        cost model."""
        idle = self._workers - (len(self._prompts) - len(self._queued))
        if len(self._queued) + len(ahead_s) < idle:
            return 0.0
        each = self.speed / self._workers
        begun = [one.left(each, now) for one in self._prompts.values() if one.began_at is not None]
        left = [0.0] * (self._workers - len(begun)) + begun
        heapq.heapify(left)
        for work_s in chain((one.work_s for one in self._queued.values()), ahead_s):
            heapq.heapreplace(left, left[0] + work_s)
        return left[0] / each

    def is_full(self, capacity: Capacity) -> bool:
        """Return whether the prefill workers have enough work: a prompt each, and ``WINDOW_S`` of
        work in all.

        Work alone is not enough: one long prompt, on a single worker, would keep the others
        idle.
        """
        if len(self._prompts) < capacity.prefill_workers:
            return False
        if self._tokens < MIN_WINDOW_TOKENS * capacity.prefill_workers:
            return False
        return self._work_s >= WINDOW_S * self.speed

    def takes(self, more_s: float) -> float:
        """Return the seconds that all workers together take for their queued work and for
        ``more_s`` further seconds of work."""
        return (self._work_s + more_s) / self.speed

    def saturated(self, now: float, *, waiting: bool) -> None:
        """Record whether requests wait for the prefill workers from ``now`` on."""
        self._throughput.saturated(now, waiting=waiting)

    def sent(self, request_id: str, tokens: int, work_s: float, now: float) -> None:
        """Record that a prompt was sent to the workers. Afterwards the caller must call either
        ``finished`` or ``left`` once."""
        prompt = self._throughput.sent(tokens, work_s, now)
        self._prompts[request_id] = self._queued[request_id] = prompt
        self._tokens += tokens
        self._work_s += work_s
        self._take_up(now)

    def finished(self, request_id: str, now: float) -> None:
        """Record that a prompt has its first token. Raises KeyError if the prompt was not sent or
        has ended."""
        self._throughput.finished(self._remove(request_id, now), now)

    def left(self, request_id: str, now: float) -> None:
        """Record that a prompt has ended without a first token; idempotent."""
        if request_id in self._prompts:
            self._throughput.left(self._remove(request_id, now))

    def _remove(self, request_id: str, now: float) -> InflightPrompt:
        gone = self._prompts.pop(request_id)
        self._tokens -= gone.tokens
        # Reset the sum, so that rounding errors do not accumulate.
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
