"""How fast the cluster finishes prompts, learned while requests wait for it.

Plain Python; ``now`` is passed in.
"""

from __future__ import annotations

import math

MEMORY_S = 15.0
"""Saturated seconds after which what was seen counts 1/e: prompts and machines change."""
ENOUGH_S = 0.5
"""Saturated seconds before the rate is believed."""


class DrainRate:
    """Prompt tokens per second, cached ones included, of all prefill workers together.

    Only time in which requests waited counts: what an idle cluster finishes says nothing of what
    it could.
    """

    def __init__(self) -> None:
        self._tokens = 0.0
        self._seconds = 0.0
        self._saturated = False
        self._since = 0.0
        self._workers = 0

    @property
    def tokens_per_s(self) -> float | None:
        """None while too little was seen."""
        if self._seconds < ENOUGH_S or self._tokens <= 0:
            return None
        return self._tokens / self._seconds

    def served_by(self, workers: int) -> None:
        """So many prefill workers there are now: what was learned of fewer, or more, is theirs.

        Nobody would learn it otherwise: where too low a rate turns all away, nobody waits.
        """
        if self._workers and workers:
            self._tokens *= workers / self._workers
        self._workers = workers or self._workers

    def saturated(self, now: float, *, waiting: bool) -> None:
        """From ``now`` on, requests wait for the prefill workers, or none does."""
        self._pass(now)
        self._saturated = waiting

    def finished(self, tokens: int, now: float) -> None:
        """A prompt of so many tokens has its first token."""
        self._pass(now)
        if self._saturated:
            self._tokens += tokens

    def _pass(self, now: float) -> None:
        elapsed, self._since = max(0.0, now - self._since), now
        if self._saturated:
            kept = math.exp(-elapsed / MEMORY_S)
            self._tokens *= kept
            # The integral of what is forgotten meanwhile, so that a steady rate stays itself.
            self._seconds = self._seconds * kept + MEMORY_S * (1 - kept)
