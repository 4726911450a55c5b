"""Tells whether a worker that starts makes progress: it reads weights, writes files, fills memory.

A worker may start for as long as it does. A checkpoint of any size thus loads from any disk, and
one that cannot be read ends the start.
"""

from __future__ import annotations

import psutil

STEP_BYTES = 64 << 20
"""Bytes that count as progress. What else a process reads and writes meanwhile, such as log lines,
is less."""


class StartProgress:
    """Counts the progress of this process. Any thread may ask."""

    def __init__(self) -> None:
        self._most = 0

    def count(self) -> int:
        """Return the number of steps of ``STEP_BYTES`` so far; it never falls."""
        # Mapped files that lie in the page cache are not read again: they appear as memory.
        process = psutil.Process()
        moved = int(process.memory_info().rss)
        try:
            io = process.io_counters()
        except (psutil.Error, OSError, AttributeError):
            pass  # a sandbox hides them
        else:
            moved += io.read_chars + io.write_chars + io.read_bytes + io.write_bytes
        self._most = max(self._most, moved // STEP_BYTES)
        return self._most


class StartWatch:
    """Decides whether a start has failed: it has made no progress for ``deadline_s``. Pure; times
    are seconds on one monotonic clock."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._count: int | None = None
        self._moved_at = 0.0

    def look(self, now: float, count: int | None) -> str:
        """Return why the start has failed, or an empty string.

        ``count`` is the worker's progress, 0 before it tells any, or None while it waits for a
        node, which does not count.
        """
        if count is None or count != self._count:
            self._count, self._moved_at = count, now
        if now - self._moved_at < self._deadline_s:
            return ""
        return (
            f"it neither served nor read on for {self._deadline_s:.0f} s: see its log, or raise "
            "start_deadline_s"
        )
