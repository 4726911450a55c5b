"""Finds stop strings in text that comes in pieces."""

from __future__ import annotations

from collections.abc import Sequence


class StopScanner:
    """Lets text through up to the first stop string that is completed.

    Text that may be the beginning of a stop string is held back. How the text was cut into pieces
    makes no difference to what is shown.
    """

    def __init__(self, stop: Sequence[str], *, include: bool = False) -> None:
        """``include``: let the stop string through too."""
        self._include = include
        self._stop = tuple(stop)
        self._longest = max(map(len, self._stop), default=0)
        self._held = ""
        self.match = ""
        """The stop string that was completed, once one is."""

    @property
    def found(self) -> bool:
        return bool(self.match)

    def feed(self, text: str) -> str:
        """The text that may be shown now."""
        if not self._stop or self.found:
            return "" if self.found else text
        text = self._held + text
        place = self._first_match(text)
        if place is not None:
            begin, end = place
            self.match, self._held = text[begin:end], ""
            return text[: end if self._include else begin]
        keep = len(text) - self._possible_start(text)
        self._held = text[keep:]
        return text[:keep]

    def rest(self) -> str:
        """What was held back, once no more text comes."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str) -> tuple[int, int] | None:
        """Begin and end of the stop string that ends first; of several the longest."""
        starts = ((text.find(stop), stop) for stop in self._stop)
        matches = [(start + len(stop), start) for start, stop in starts if start >= 0]
        if not matches:
            return None
        end, begin = min(matches)
        return begin, end

    def _possible_start(self, text: str) -> int:
        """Length of the longest end of ``text`` with which a stop string begins."""
        for length in range(min(len(text), self._longest - 1), 0, -1):
            tail = text[-length:]
            if any(stop.startswith(tail) for stop in self._stop):
                return length
        return 0
