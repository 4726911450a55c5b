"""The prompts that were sent to the prefill workers: what is left of them, and when one is free.

Each worker computes one prompt at a time, in the order of their sending, at its share of the drain
rate: an idle one helps nobody. Plain Python; ``now`` is passed in.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(slots=True)
class _Prompt:
    tokens: int
    began_at: float | None = None
    """When a worker took it up; None: they all had others."""

    def left(self, worker_tokens_per_s: float, now: float) -> float:
        """Tokens that are still to be computed, as far as is known."""
        if self.began_at is None:
            return self.tokens
        return max(0.0, self.tokens - worker_tokens_per_s * (now - self.began_at))


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

    def __len__(self) -> int:
        return len(self._prompts)

    @property
    def tokens(self) -> int:
        """Of all of them."""
        return self._tokens

    def served_by(self, workers: int, now: float) -> None:
        """So many prefill workers there are now."""
        self.workers = max(1, workers)
        self._take_up(now)

    def sent(self, request_id: str, tokens: int, now: float) -> None:
        """A prompt goes to the workers."""
        self._prompts[request_id] = self._line[request_id] = _Prompt(tokens)
        self._tokens += tokens
        self._take_up(now)

    def gone(self, request_id: str, now: float) -> None:
        """It has its first token, or has left without one. Raises KeyError for one not sent."""
        self._tokens -= self._prompts.pop(request_id).tokens
        self._line.pop(request_id, None)
        self._take_up(now)

    def _take_up(self, now: float) -> None:
        free = self.workers - (len(self._prompts) - len(self._line))
        while free > 0 and self._line:
            first = next(iter(self._line))
            self._line.pop(first).began_at = now
            free -= 1

    def left_tokens(self, tokens_per_s: float, now: float) -> float:
        """What is still to be computed of all, as far as is known, at this drain rate of all."""
        each = tokens_per_s / self.workers
        return sum(prompt.left(each, now) for prompt in self._prompts.values())

    def free_after_s(self, ahead_tokens: float, tokens_per_s: float, now: float) -> float:
        """Seconds until a worker takes up a prompt that is sent behind ``ahead_tokens`` more."""
        each = tokens_per_s / self.workers
        begun = [one.left(each, now) for one in self._prompts.values() if one.began_at is not None]
        idle = self.workers - len(begun)
        in_line = sum(prompt.tokens for prompt in self._line.values())
        return _level([0.0] * idle + begun, in_line + ahead_tokens) / each


def _level(left: Sequence[float], more: float) -> float:
    """How much the one with the least has, when ``more`` was given to those with the least."""
    rising = sorted(left)
    if not more:
        return rising[0]
    total = more
    for count, amount in enumerate(rising):
        if count and total <= count * amount:
            return total / count
        total += amount
    return total / len(rising)
