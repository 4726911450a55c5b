"""Finds stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Lets text through up to the first stop string that is completed.

    Text that may be the beginning of a stop string is held back. How the text was cut into pieces
    makes no difference to what is shown.
    """

    def __init__(self, stop: Sequence[str]) -> None:
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.found = False

    def feed(self, text: str) -> str:
        """The text that may be shown now."""
        if not self._stop or self.found:
            return "" if self.found else text
        text = self._held + text
        match = self._first_match(text)
        if match is not None:
            self.found, self._held = True, ""
            return text[:match]
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def rest(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> int | None:
        """Where the stop string begins that ends first; of several the longest."""
        starts = ((text.find(stop), stop) for stop in self._stop)
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        return min(matches)[1] if matches else None

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
