"""Counts what comes to a router, and what it is expected to become. Pure.

An answer's length is known when it ends. Until then a request counts with the mean of the answers
that its context-length class has had lately: so a shift from one kind of request to another is
seen when they come, those that are refused included. Owned by the router's event loop.
"""

from __future__ import annotations

from baton.autoscaling.traffic_counts import TrafficCounts

FIRST_ANSWER_TOKENS = 256
"""The expected length of an answer before one of its class was seen, as
``router.admission.capacity`` has it."""
_WEIGHT = 0.1
"""Of the latest answer in the mean."""


class TrafficMeter:
    """See the module's text."""

    def __init__(self) -> None:
        self.counts = TrafficCounts()
        """Its times are counted by others."""
        self._lengths: dict[str, float] = {}
        """Mean tokens of an answer, by class."""

    def came(self, context_class: str, prompt_tokens: int, max_tokens: int) -> None:
        """A request has come, whose answer has so many tokens at most."""
        self.counts.requests += 1
        self.counts.input_tokens += prompt_tokens
        guess = min(FIRST_ANSWER_TOKENS, max_tokens)
        self.counts.expected_tokens += self._lengths.get(context_class, guess)

    def ended(self, context_class: str, tokens: int) -> None:
        """An answer has ended well with so many tokens."""
        known = self._lengths.get(context_class, float(tokens))
        self._lengths[context_class] = known + _WEIGHT * (tokens - known)
