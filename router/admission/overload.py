"""Whether more work arrives than the cluster can do, and which requests test the predictions.

While requests are refused for time, a few are accepted all the same: probes.

Plain Python; ``now`` is passed in. Owned by one event loop.
"""

from __future__ import annotations

import math

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
