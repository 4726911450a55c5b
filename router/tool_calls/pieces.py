"""What a parser of tool calls makes of an answer's text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Text for the reader."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """A call of the tool with this name; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the latest call's arguments: JSON, as the model wrote it."""

    text: str


Piece = Content | CallBegun | Arguments


class ToolParser(Protocol):
    """Takes an answer's text as it comes.

    However the text is cut, the pieces of a kind that follow each other join to the same texts. No
    text is given out that may still turn out to be the beginning of a call.
    """

    def feed(self, text: str) -> list[Piece]:
        """What is certain now."""

    def finish(self) -> list[Piece]:
        """What was held back, once no more text comes."""


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call; ``arguments`` are JSON unless the model failed or was cut short."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    """A whole answer."""

    content: str
    calls: tuple[Call, ...]


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """The same with pieces of one kind that follow each other put together, and none empty."""
    whole: list[Piece] = []
    for piece in pieces:
        last = whole[-1] if whole else None
        if isinstance(piece, Content) and isinstance(last, Content):
            whole[-1] = Content(last.text + piece.text)
        elif isinstance(piece, Arguments) and isinstance(last, Arguments):
            whole[-1] = Arguments(last.text + piece.text)
        elif isinstance(piece, CallBegun) or piece.text:
            whole.append(piece)
    return whole


def parse(parser: ToolParser, text: str) -> Parsed:
    """All of a text; ``parser`` is fresh."""
    return gathered([*parser.feed(text), *parser.finish()])


def gathered(pieces: Sequence[Piece]) -> Parsed:
    """All pieces of an answer as its content and its calls."""
    content: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, Content):
            content.append(piece.text)
        elif isinstance(piece, CallBegun):
            calls.append((piece.name, []))
        else:
            calls[-1][1].append(piece.text)
    whole = tuple(Call(name, "".join(arguments)) for name, arguments in calls)
    return Parsed("".join(content), whole)
