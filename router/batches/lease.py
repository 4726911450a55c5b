"""Who may take over a batch: its owner's beat is watched, on the watcher's own clock.

Clock times of the database would be wrong after the machine's clock was set, and a monotonic one
begins anew when the machine does. Plain Python; ``now`` is passed in.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

LEASE_S = 10.0
"""An owner whose beat has not risen for so long is gone; it beats every second."""


class LeaseWatch:
    """Owned by one event loop."""

    def __init__(self, lease_s: float = LEASE_S) -> None:
        self._lease_s = lease_s
        self._seen: dict[str, tuple[Hashable, float]] = {}

    def silent(self, name: str, beat: Hashable, now: float) -> bool:
        """Whether ``name`` has been watched for a lease's time and its beat was this all along."""
        known = self._seen.get(name)
        if known is None or known[0] != beat:
            self._seen[name] = (beat, now)
            return False
        return now - known[1] >= self._lease_s

    def keep(self, names: Iterable[str]) -> None:
        """Forget all others."""
        wanted = set(names)
        self._seen = {name: seen for name, seen in self._seen.items() if name in wanted}
