"""The prompts that were sent to the prefill workers: what is left of them, and when one is free.

Each worker computes one prompt at a time, in the order of their sending, at its share of the speed
of all. The cost model says how long one worker computes a prompt; how fast all of them finish work
is learned while requests wait (``router.admission.prefill_throughput``), since other work shares
their cores and caches save some. What was learned is weighed against the model by how much of it
there is: it fades within seconds of other traffic, and an idle cluster has the model alone.

Work is in seconds, speed is work per second. Plain Python; ``now`` is passed in. Owned by one event
loop.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Set
from dataclasses import dataclass
from itertools import chain

from router.admission.capacity import Capacity
from router.admission.prefill_throughput import PrefillThroughput, Sample

MODEL_EVIDENCE_S = 0.5
"""The cost model counts as this many seconds of what was learned."""
WINDOW_S = 0.25
"""Seconds of work that wait at each prefill worker: one step runs, the next one is ready."""
MIN_WINDOW_TOKENS = 1024
"""Minimum of prompt tokens that wait there as well: two chunks of a CPU's prefill."""


@dataclass(slots=True)
class _Prompt:
    tokens: int
    sample: Sample
    began_at: float | None = None
    """When a worker took it up; None: all workers had other prompts."""

    def left(self, worker_speed: float, now: float) -> float:
        """Work that is still to be done, as far as is known."""
        work_s = self.sample.work_s
        if self.began_at is None:
            return work_s
        return max(0.0, work_s - worker_speed * (now - self.began_at))


class InflightPrefills:
    """Prompts between their sending and their first token."""

    def __init__(self) -> None:
        self._throughput = PrefillThroughput()
        self._prompts: dict[str, _Prompt] = {}
        """In the order of their sending."""
        self._queued: dict[str, _Prompt] = {}
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
        for work_s in chain((one.sample.work_s for one in self._queued.values()), ahead_s):
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
        prompt = _Prompt(tokens, self._throughput.sent(work_s, now))
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

    def _remove(self, request_id: str, now: float) -> Sample:
        gone = self._prompts.pop(request_id)
        self._tokens -= gone.tokens
        # A sum of many numbers: its rounding ends where none is left.
        self._work_s = self._work_s - gone.sample.work_s if self._prompts else 0.0
        self._queued.pop(request_id, None)
        self._take_up(now)
        return gone.sample

    def _take_up(self, now: float) -> None:
        free = self._workers - (len(self._prompts) - len(self._queued))
        while free > 0 and self._queued:
            first = next(iter(self._queued))
            self._queued.pop(first).began_at = now
            free -= 1
