"""The latest requests that have ended, with the measurements that the console simulates from."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

MAX_RECENT_REQUESTS = 1000


@dataclass(frozen=True, slots=True)
class RecentRequest:
    """The measurements of a request that has ended, whether or not it succeeded."""

    received_at: float
    """Time at which the request was received, in seconds. The code that adds the record chooses the
    clock."""
    prompt_tokens: int
    output_tokens: int | None
    """Number of tokens of the request's answer; None if the answer did not end by itself."""
    cached_tokens: int
    """Number of the request's prompt tokens that were found in a cache."""
    ttft_s: float | None = None
    """Time from receipt to the first token, in seconds; None unless the request ended well."""
    tpot_s: float | None = None
    """Time per output token, in seconds; None unless the request ended well, with two tokens."""
    is_good: bool | None = None
    """Whether the request met every SLO; None if no SLO applies: the client disconnected, or no
    token was asked for."""


class RecentRequests:
    """The last ``MAX_RECENT_REQUESTS`` requests that have ended."""

    def __init__(self) -> None:
        self._requests: deque[RecentRequest] = deque(maxlen=MAX_RECENT_REQUESTS)
        self.ended = 0
        """Total number of requests that were ever added to the list of recent requests."""

    def add(self, request: RecentRequest) -> None:
        """Add a request that has ended."""
        self._requests.append(request)
        self.ended += 1

    def since(self, start: float) -> list[RecentRequest]:
        """Return the requests received at ``start`` or later, in order of receipt."""
        found = [one for one in self._requests if one.received_at >= start]
        return sorted(found, key=lambda one: one.received_at)
