"""The latest requests of a router, in plain numbers: no prompt, no client.

Owned by the router's event loop.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """A request that has ended, however it did."""

    received_at: float
    """Seconds, of the clock of whoever adds it."""
    prompt_tokens: int
    output_tokens: int | None
    """None where nobody knows how long its answer would have been."""
    cached_tokens: int
    """Of the prompt, that were found in a cache."""


class RecentRequests:
    """The last ``MAX_REQUESTS`` that have ended."""

    def __init__(self) -> None:
        self._requests: deque[RecentRequest] = deque(maxlen=MAX_REQUESTS)
        self.ended = 0
        """All that ever were added."""

    def add(self, request: RecentRequest) -> None:
        """One has ended."""
        self._requests.append(request)
        self.ended += 1

    def since(self, start: float) -> list[RecentRequest]:
        """Those that came at ``start`` or later, in the order in which they came."""
        found = [one for one in self._requests if one.received_at >= start]
        return sorted(found, key=lambda one: one.received_at)
