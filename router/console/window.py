"""What counts have grown by lately. Plain Python, no clock.

Counts only grow, unless the process that had them begins anew: then what it has now is new.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from itertools import islice

Key = tuple[str, ...]
"""The name of a count, and what tells it from others of that name."""
Counts = Mapping[Key, float]


class Window:
    """The samples of the last ``span_s`` seconds, and the one before them."""

    def __init__(self, span_s: float) -> None:
        self._span_s = span_s
        self._samples: deque[tuple[float, Counts]] = deque()

    def add(self, now: float, counts: Counts) -> None:
        """A look at all counts, later than those before it."""
        self._samples.append((now, counts))
        while len(self._samples) > 2 and now - self._samples[1][0] >= self._span_s:
            self._samples.popleft()

    def clear(self) -> None:
        """Nobody looks for a while."""
        self._samples.clear()

    def growth(self, span_s: float) -> tuple[float, dict[Key, float]]:
        """Seconds from the look about ``span_s`` ago, or the first one, to the last; and by how

        much each count has grown meanwhile. 0 seconds while there are fewer than two looks. A count
        that was not there then has come with a process or a label of its own, and counts whole.
        """
        if len(self._samples) < 2:
            return 0.0, {}
        now, last = self._samples[-1]
        begun, first = self._samples[0]
        for at, counts in islice(self._samples, len(self._samples) - 1):
            if now - at < span_s:
                break
            begun, first = at, counts
        grown: dict[Key, float] = {}
        for key, value in last.items():
            before = first.get(key, 0.0)
            grown[key] = value - before if value >= before else value
        return now - begun, grown
