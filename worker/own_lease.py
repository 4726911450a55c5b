"""Whether this worker's registry entry lapsed because the worker itself stood still.

A process that was stopped (SIGSTOP, a suspended machine), or whose event loop was blocked, for
longer than its entry lives was dead to everybody else meanwhile: its requests may run elsewhere,
and its promises are void. Only its own clock tells: the registry may have been away as well, which
condemns nobody.

Pure: ``now`` is monotonic, in seconds.
"""

from __future__ import annotations


class OwnLease:
    """Owned by the control loop, which calls ``beat`` every quarter of a heartbeat or so."""

    def __init__(self, ttl_s: float, heartbeat_s: float) -> None:
        """``ttl_s`` is how long an entry lives that is not renewed."""
        self._ttl_s = ttl_s
        self._heartbeat_s = heartbeat_s
        self._beaten_at: float | None = None
        self._renewed_at: float | None = None
        self.lapsed = False
        """Whether it has. Stays so until ``begin``."""

    def begin(self) -> None:
        """Another life begins, with no entry yet."""
        self._renewed_at = None
        self.lapsed = False

    @property
    def registered(self) -> bool:
        """Whether this life has an entry to renew."""
        return self._renewed_at is not None

    def renewed(self, asked_at: float) -> None:
        """The entry was renewed, by a call that began at ``asked_at``."""
        self._renewed_at = asked_at

    def beat(self, now: float) -> bool:
        """The event loop runs. Returns ``lapsed``."""
        stood_since, self._beaten_at = self._beaten_at, now
        if stood_since is None or self._renewed_at is None:
            return self.lapsed
        stood_still = now - stood_since > self._heartbeat_s
        # Until then it was renewed as usual: else the registry is to blame.
        was_alive = stood_since - self._renewed_at <= 2 * self._heartbeat_s
        if stood_still and was_alive and now - self._renewed_at > self._ttl_s:
            self.lapsed = True
        return self.lapsed
