"""Counts the tokens of an answer's reasoning by their text, with the same result as the reasoning
parser."""

from __future__ import annotations

import enum

from router.core.request import AnswerPart, ReasoningMarkers


class _Part(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    BETWEEN = enum.auto()
    BEHIND = enum.auto()


class ReasoningCounter:
    """Counts the reasoning tokens of one answer: those whose text begins within the reasoning.

    Tokens that may belong to a marker are counted when that is decided.
    """

    def __init__(self, markers: ReasoningMarkers, begins_in: AnswerPart) -> None:
        """Create a counter; ``begins_in``: the part of the answer in which the prompt ends."""
        self._markers = markers
        self._is_open = begins_in == "reasoning"
        self._part = _Part.BEHIND if begins_in == "content" else _Part.BEFORE
        self._held = ""
        """The latest text of the answer, as long as it may belong to a marker."""
        self._starts: list[int] = []
        """Offsets in ``_held`` at which its tokens begin."""
        self.count = 0
        """Number of reasoning tokens so far."""

    def take(self, text: str) -> None:
        """Count the next token of the answer; ``text`` is its text."""
        if self._part is _Part.BEHIND:
            return
        self._starts.append(len(self._held))
        self._held += text
        if self._part is _Part.BEFORE:
            self._begin()
        elif self._part is _Part.BETWEEN:
            self._begin_again()
        if self._part is _Part.INSIDE:
            self._look_for_end()

    def finish(self) -> None:
        """Note that the answer has ended: held-back text that might have become a marker now counts
        as ordinary text."""
        if self._part is _Part.INSIDE or (self._part is _Part.BEFORE and self._is_open):
            self.count += len(self._starts)
        self._part = _Part.BEHIND

    @property
    def _behind(self) -> _Part:
        return _Part.BETWEEN if self._markers.repeat else _Part.BEHIND

    def _begin(self) -> None:
        start, text = self._markers.start, self._held.lstrip()
        if text.startswith(start):
            self._part = _Part.INSIDE
            self._cut(len(self._held) - len(text) + len(start))
        elif not start.startswith(text):
            self._part = _Part.INSIDE if self._is_open else self._behind

    def _begin_again(self) -> None:
        start = self._markers.start
        place = self._held.find(start)
        if place >= 0:
            self._part = _Part.INSIDE
            self._cut(place + len(start))
        else:
            self._cut(len(self._held) - _possible_start(self._held, start))

    def _look_for_end(self) -> None:
        ends = self._markers.ends
        places = [place for end in ends if (place := self._held.find(end)) >= 0]
        if places:
            # The last token completes the marker. Any text of it before the marker belongs to a
            # character that is cut short.
            self.count += sum(start < min(places) for start in self._starts[:-1])
            self._part = self._behind
            self._cut(len(self._held))
            return
        kept = max(_possible_start(self._held, end) for end in ends)
        known = len(self._held) - kept
        self.count += sum(not kept or start < known for start in self._starts)
        self._cut(known)
        if not kept:
            self._starts.clear()

    def _cut(self, end: int) -> None:
        """Drop the held text before the offset ``end``, and the tokens that begin in it."""
        self._held = self._held[end:]
        self._starts = [start - end for start in self._starts if start >= end]


def reasoning_counter(
    markers: ReasoningMarkers | None, begins_in: AnswerPart
) -> ReasoningCounter | None:
    """Create a counter for an answer's reasoning; None if the model's answers have no reasoning."""
    if markers is None or begins_in == "content":
        return None
    return ReasoningCounter(markers, begins_in)


def _possible_start(text: str, marker: str) -> int:
    """Return the length of the longest suffix of ``text`` with which ``marker`` begins."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
