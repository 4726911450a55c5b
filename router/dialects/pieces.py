"""The pieces that a parser splits an answer's text into."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer outside of reasoning and calls."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Text of the model's reasoning, without its markers."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The start of a call of the tool ``name``; its arguments follow."""

    name: str
    id: str = ""
    """The tool call's id if the model writes one."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the latest tool call's arguments: JSON, unless the model has failed."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of the latest tool call. There is no ``CallEnd`` for a call that is cut off by the
    end of the answer."""


Piece = Content | Reasoning | CallStart | Arguments | CallEnd


class AnswerParser(Protocol):
    """Parses one answer, whose text arrives in parts.

    Adjacent pieces of one type join to the same text, no matter how the answer is split.
    """

    def feed(self, text: str) -> list[Piece]:
        """Parse the next part of the answer. Return the pieces that are now certain."""

    def finish(self) -> list[Piece]:
        """End the answer. Return the pieces of the text that was held back."""


class SteppedParser(abc.ABC):
    """Base class of an ``AnswerParser`` that holds text back. It calls ``_step`` on that text while
    the steps make progress."""

    def __init__(self) -> None:
        self._text = ""
        """Text of the answer that is held back, because its meaning is not certain yet."""
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """Parse the next part of the answer. Return the pieces that are now certain. See
        ``AnswerParser``."""
        self._text += text
        while self._text and self._step():
            pass
        return self._taken()

    def finish(self) -> list[Piece]:
        """End the answer. Return the pieces of the text that was held back. See
        ``AnswerParser``."""
        rest, self._text = self._text, ""
        self._end(rest)
        return self._taken()

    @abc.abstractmethod
    def _step(self) -> bool:
        """Parse a part of the held text. Return whether another step may make progress."""

    @abc.abstractmethod
    def _end(self, rest: str) -> None:
        """Emit ``rest``, the text that is still held back when the answer ends."""

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return joined(pieces)


class PlainParser:
    """A parser for answers without markers: all text is content."""

    def feed(self, text: str) -> list[Piece]:
        """Parse the next part of the answer. Return the pieces that are now certain. See
        ``AnswerParser``."""
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        """End the answer. Return the pieces of the text that was held back. See
        ``AnswerParser``."""
        return []


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join adjacent pieces of one type, and drop empty ones."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(piece, CallStart | CallEnd):
            whole.append(piece)
        elif isinstance(last, type(piece)):
            whole[-1] = type(piece)(last.text + piece.text)
        elif piece.text:
            whole.append(piece)
    return whole


def first_marker(text: str, markers: Iterable[str]) -> tuple[int, str]:
    """Find the first of ``markers`` in ``text``. Return its position and the marker; -1 and "" if
    there is none.

    If several begin at one position, the longest counts.
    """
    found = [(place, -len(one), one) for one in markers if (place := text.find(one)) >= 0]
    place, _, marker = min(found, default=(-1, 0, ""))
    return place, marker


def possible_start(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest suffix of ``text`` with which one of ``markers`` begins."""
    longest = 0
    for marker in markers:
        for length in range(min(len(text), len(marker) - 1), longest, -1):
            if marker.startswith(text[-length:]):
                longest = length
                break
    return longest
