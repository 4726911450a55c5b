"""Whether this worker stood still long enough for its registry entry to have lapsed.

    renewed ─stood still for longer than the entry's TTL→ in doubt ─renewed since→ renewed

A process may have been stopped (SIGSTOP, a suspended machine), or its event loop blocked. Its peers
may consider it dead, or they stopped with it. Its own clock does not show which, so the registry is
queried at once. If the registry was unreachable before, the worker did not cause the lapse.

Pure: ``now`` is monotonic, in seconds.
"""

from __future__ import annotations


class OwnLease:
    """The lease of this worker's registry entry. The event loop calls ``beat`` about four times per
    heartbeat."""

    def __init__(self, ttl_s: float, heartbeat_s: float) -> None:
        """``ttl_s`` is the number of seconds after which a registry entry lapses unless it is
        renewed."""
        self._ttl_s = ttl_s
        self._heartbeat_s = heartbeat_s
        self._beaten_at: float | None = None
        self._renewed_at: float | None = None
        self._woke_at: float | None = None

    def begin(self) -> None:
        """Begin another session, which has no registry entry yet."""
        self._renewed_at = self._woke_at = None

    @property
    def registered(self) -> bool:
        """Whether the current session has a registry entry to renew."""
        return self._renewed_at is not None

    @property
    def stood_still(self) -> bool:
        """Whether the worker stood still for so long that its entry may have lapsed, and has not
        renewed the entry since."""
        return self._woke_at is not None

    def renewed(self, asked_at: float) -> None:
        """Record that the entry was renewed. ``asked_at`` is the time at which the registry call
        began."""
        self._renewed_at = asked_at
        if self._woke_at is not None and asked_at >= self._woke_at:
            self._woke_at = None

    def beat(self, now: float) -> bool:
        """Record that the event loop runs. Returns whether it had stood still for so long that the
        entry may have lapsed."""
        stood_since, self._beaten_at = self._beaten_at, now
        if stood_since is None or self._renewed_at is None:
            return False
        stood_still = now - stood_since > self._heartbeat_s
        # If the entry was not renewed as usual until then, the registry caused the lapse.
        was_alive = stood_since - self._renewed_at <= 2 * self._heartbeat_s
        if not (stood_still and was_alive and now - self._renewed_at > self._ttl_s):
            return False
        self._woke_at = now
        return True
