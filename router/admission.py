"""Who gets in: a bound on the requests that wait for their first token.

Plain Python; ``now`` is passed in.
"""

from __future__ import annotations

from baton.errors import Overloaded

_WEIGHT = 0.1
_FIRST_GUESS_S = 1.0


class Admission:
    """Counts those that wait, and learns how long they do."""

    def __init__(self, limit: int) -> None:
        """At most ``limit`` requests wait at a time."""
        self._limit = limit
        self._waiting: dict[object, float] = {}
        self._typical_wait_s = _FIRST_GUESS_S

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def admit(self, request: object, now: float) -> None:
        """Let a request in. Raises Overloaded, with the wait that is typical at present."""
        if len(self._waiting) >= self._limit:
            raise Overloaded(
                f"{len(self._waiting)} requests wait already; try again later",
                retry_after=max(1.0, self._typical_wait_s),
            )
        self._waiting[request] = now

    def first_token(self, request: object, now: float) -> None:
        """A request waits no longer."""
        admitted = self._waiting.pop(request, None)
        if admitted is not None:
            self._typical_wait_s += _WEIGHT * (now - admitted - self._typical_wait_s)

    def left(self, request: object) -> None:
        """A request has ended, with or without a token; idempotent."""
        self._waiting.pop(request, None)
