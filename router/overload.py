"""Whether more work comes than can be done, and which requests are let through to see whether what

is predicted is still true.

Plain Python; ``now`` is passed in. Owned by one event loop.
"""

from __future__ import annotations

import math

MEMORY_S = 5.0
"""Work that came this many seconds ago counts 1/e."""
SUSTAINABLE = 0.8
"""Up to this share of what can be done a line shortens by itself."""
PROBE_S = 1.0
"""How often a request is let through while others like it are refused for time."""
PROBE_SHARE = 0.1
"""Of a worker's time probes of long prompts take no more than this,"""
MAX_PROBE_S = 10.0
"""but one goes through after this many seconds, however long it is predicted to take."""


class Overload:
    """See the module's text."""

    def __init__(self) -> None:
        self._work_s = 0.0
        self._requests = 0.0
        self._now = -math.inf
        self._refused_since: dict[int, float] = {}
        """By a power of two of prompt tokens: when one was refused, and none was let in since."""
        self._probe: str | None = None
        """The request that was let through and has no first token yet."""

    def came(self, work_s: float, now: float) -> None:
        """A request was offered, with so many seconds of prefill work; refused ones count too."""
        self._pass(now)
        self._work_s += work_s
        self._requests += 1.0

    def lasts(self, speed: float, answers_per_s: float, now: float) -> bool:
        """Whether more comes than is done: by prefill workers of that speed in work per second,

        and by decode workers at which so many answers a second can end.
        """
        self._pass(now)
        prefill, decode = self._work_s / MEMORY_S, self._requests / MEMORY_S
        return prefill > SUSTAINABLE * speed or decode > SUSTAINABLE * answers_per_s

    def let_in(self, prompt_tokens: int) -> None:
        """A request was let in: what is known of its like is current."""
        self._refused_since.pop(prompt_tokens.bit_length(), None)

    def probes(self, request_id: str, prompt_tokens: int, own_s: float, now: float) -> bool:
        """Whether a request that would be refused for time is let through; it counts as let in.

        ``own_s`` is what a worker takes for its prompt, as predicted.
        """
        since = self._refused_since.setdefault(prompt_tokens.bit_length(), now)
        every_s = min(MAX_PROBE_S, max(PROBE_S, own_s / PROBE_SHARE))
        if self._probe is not None or now - since < every_s:
            return False
        self._probe = request_id
        return True

    def is_probe(self, request_id: str) -> bool:
        """Whether it is the one that was let through."""
        return request_id == self._probe

    def begun(self, request_id: str) -> None:
        """It has its first token, or has gone."""
        if request_id == self._probe:
            self._probe = None

    def _pass(self, now: float) -> None:
        if now > self._now:
            kept = math.exp((self._now - now) / MEMORY_S)
            self._work_s *= kept
            self._requests *= kept
            self._now = now
