"""How fast a pair's bytes land, learned from those that have.

Plain Python: ``now`` is passed in, in seconds.
"""

from __future__ import annotations

_WEIGHT = 0.2
"""Of the newest sample."""
_MIN_BYTES = 64 << 10
"""A smaller sample tells of messages, not of bytes."""


class Bandwidth:
    """Bytes per second of one pair, while there is something to send."""

    def __init__(self, bytes_per_s: float) -> None:
        """``bytes_per_s`` is taken for true until there are samples."""
        self.bytes_per_s = bytes_per_s
        self._busy_since: float | None = None

    def began(self, now: float) -> None:
        """Something is on its way."""
        if self._busy_since is None:
            self._busy_since = now

    def landed(self, count: int, now: float, *, is_idle: bool) -> None:
        """``count`` bytes have landed; ``is_idle``: nothing else is on its way."""
        since, self._busy_since = self._busy_since, None if is_idle else now
        if since is None or count < _MIN_BYTES or now <= since:
            return
        self.bytes_per_s += _WEIGHT * (count / (now - since) - self.bytes_per_s)
