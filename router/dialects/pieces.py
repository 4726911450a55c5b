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
    """The call's id if the model writes one."""


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the latest call's arguments: JSON, unless the model has failed."""

    text: str


@dataclass(frozen=True, slots=True)
class CallEnd:
    """The end of the latest call. A call that the answer's end cuts short has none."""


Piece = Content | Reasoning | CallStart | Arguments | CallEnd


class AnswerParser(Protocol):
    """Parses one answer, whose text comes in parts.

    Adjacent pieces of a kind join to the same text however the answer is cut into parts.
    """

    def feed(self, text: str) -> list[Piece]:
        """Parse the next part. Returns the pieces that are certain now."""

    def finish(self) -> list[Piece]:
        """End the text. Returns what was held back."""


class SteppedParser(abc.ABC):
    """An ``AnswerParser`` that holds text back, and takes steps as long as they get on."""

    def __init__(self) -> None:
        self._text = ""
        """Text that is held back."""
        self._pieces: list[Piece] = []

    def feed(self, text: str) -> list[Piece]:
        """See ``AnswerParser``."""
        self._text += text
        while self._text and self._step():
            pass
        return self._taken()

    def finish(self) -> list[Piece]:
        """See ``AnswerParser``."""
        rest, self._text = self._text, ""
        self._end(rest)
        return self._taken()

    @abc.abstractmethod
    def _step(self) -> bool:
        """Read of the text that is held back. Returns whether another step may get on."""

    @abc.abstractmethod
    def _end(self, rest: str) -> None:
        """Give what was held back at the end of the text."""

    def _taken(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return joined(pieces)


class PlainParser:
    """For answers in which nothing is to be found: all text is content."""

    def feed(self, text: str) -> list[Piece]:
        """See ``AnswerParser``."""
        return [Content(text)] if text else []

    def finish(self) -> list[Piece]:
        """See ``AnswerParser``."""
        return []


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join adjacent pieces of one kind, and drop empty ones."""
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
    """The place and the text of the first of ``markers`` in ``text``; -1 and "" if there is none.

    Of markers at one place, the longest counts.
    """
    found = [(place, -len(one), one) for one in markers if (place := text.find(one)) >= 0]
    place, _, marker = min(found, default=(-1, 0, ""))
    return place, marker


def possible_start(text: str, markers: Iterable[str]) -> int:
    """Length of the longest end of ``text`` that begins one of ``markers``."""
    longest = 0
    for marker in markers:
        for length in range(min(len(text), len(marker) - 1), longest, -1):
            if marker.startswith(text[-length:]):
                longest = length
                break
    return longest
