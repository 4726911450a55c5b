"""A whole answer, parsed for tool calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.dialects.pieces import (
    AnswerParser,
    Arguments,
    CallStart,
    Content,
    Piece,
    Reasoning,
)


@dataclass(frozen=True, slots=True)
class Call:
    """A whole call; ``arguments`` are JSON unless the model failed or was cut short."""

    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Parsed:
    content: str
    calls: tuple[Call, ...] = ()
    reasoning: str = ""


def parse(parser: AnswerParser, text: str) -> Parsed:
    """Parse all of a text; ``parser`` is fresh."""
    return gathered([*parser.feed(text), *parser.finish()])


def gathered(pieces: Sequence[Piece]) -> Parsed:
    """The content and the calls of an answer's pieces."""
    content: list[str] = []
    reasoning: list[str] = []
    calls: list[tuple[str, list[str]]] = []
    for piece in pieces:
        if isinstance(piece, Content):
            content.append(piece.text)
        elif isinstance(piece, Reasoning):
            reasoning.append(piece.text)
        elif isinstance(piece, CallStart):
            calls.append((piece.name, []))
        elif isinstance(piece, Arguments):
            calls[-1][1].append(piece.text)
    whole = tuple(Call(name, "".join(arguments)) for name, arguments in calls)
    return Parsed("".join(content), whole, "".join(reasoning))
