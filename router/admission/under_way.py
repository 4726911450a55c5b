"""The prompts that were sent to the prefill workers: what is left of them, and when one is free.

Each worker computes one prompt at a time, in the order of their sending, at its share of the
speed of all. Work is in seconds, speed is work per second (``router.admission.drain_rate``).
Plain Python; ``now`` is passed in.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import chain


@dataclass(slots=True)
class _Prompt:
    tokens: int
    work_s: float
    began_at: float | None = None
    """When a worker took it up; None: they all had others."""

    def left(self, worker_speed: float, now: float) -> float:
        """Work that is still to be done, as far as is known."""
        if self.began_at is None:
            return self.work_s
        return max(0.0, self.work_s - worker_speed * (now - self.began_at))


class UnderWay:
    """Owned by one event loop."""

    def __init__(self) -> None:
        self._prompts: dict[str, _Prompt] = {}
        """In the order of their sending."""
        self._line: dict[str, _Prompt] = {}
        """Those of them that nobody has taken up."""
        self.workers = 1
        """Prefill workers; read only."""
        self._tokens = 0
        self._work_s = 0.0

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return self._tokens

    @property
    def work_s(self) -> float:
        """Seconds of work of all of them, including what is done already."""
        return self._work_s

    def served_by(self, workers: int, now: float) -> None:
        """So many prefill workers there are now."""
        self.workers = max(1, workers)
        self._take_up(now)

    def sent(self, request_id: str, tokens: int, work_s: float, now: float) -> None:
        """A prompt goes to the workers."""
        self._prompts[request_id] = self._line[request_id] = _Prompt(tokens, work_s)
        self._tokens += tokens
        self._work_s += work_s
        self._take_up(now)

    def gone(self, request_id: str, now: float) -> None:
        """It has its first token, or has left without one. Raises KeyError for one not sent."""
        gone = self._prompts.pop(request_id)
        self._tokens -= gone.tokens
        # A sum of many numbers: its rounding ends where none is left.
        self._work_s = self._work_s - gone.work_s if self._prompts else 0.0
        self._line.pop(request_id, None)
        self._take_up(now)

    def _take_up(self, now: float) -> None:
        free = self.workers - (len(self._prompts) - len(self._line))
        while free > 0 and self._line:
            first = next(iter(self._line))
            self._line.pop(first).began_at = now
            free -= 1

    def free_after_s(self, ahead_s: Iterable[float], speed: float, now: float) -> float:
        """Seconds until a worker takes up a prompt behind others with ``ahead_s`` of work each."""
        each = speed / self.workers
        begun = [one.left(each, now) for one in self._prompts.values() if one.began_at is not None]
        left = [0.0] * (self.workers - len(begun)) + begun
        heapq.heapify(left)
        for work_s in chain((prompt.work_s for prompt in self._line.values()), ahead_s):
            heapq.heapreplace(left, left[0] + work_s)
        return left[0] / each
