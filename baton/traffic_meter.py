"""Counts what comes to a router, and what it is expected to become. Pure.

An answer's length is known when it ends. Until then a request counts with the mean of the answers
that its context-length class has had lately: so a shift from one kind of request to another is
seen when they come, those that are refused included. Owned by the router's event loop.
"""

from __future__ import annotations

from baton.traffic_counts import TrafficCounts

_WEIGHT = 0.1
"""Of the latest answer in the mean."""


class TrafficMeter:
    """See the module's text."""

    def __init__(self) -> None:
        self.counts = TrafficCounts()
        """Its tokens and times are counted by others, too."""
        self._lengths: dict[str, float] = {}
        """Mean tokens of an answer, by class."""

    def came(self, context_class: str, prompt_tokens: int) -> None:
        """A request has come."""
        self.counts.requests += 1
        self.counts.input_tokens += prompt_tokens
        expected = self._lengths.get(context_class)
        if expected is not None:
            self.counts.foreseen_requests += 1
            self.counts.foreseen_tokens += expected

    def ended(self, context_class: str, tokens: int) -> None:
        """An answer has ended well with so many tokens."""
        known = self._lengths.get(context_class, float(tokens))
        self._lengths[context_class] = known + _WEIGHT * (tokens - known)
