"""The pieces that a tool-call parser splits an answer's text into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Content:
    """Text of the answer outside of calls."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The start of a call of the tool ``name``; its arguments follow."""

    name: str


@dataclass(frozen=True, slots=True)
class Arguments:
    """The next part of the latest call's arguments: JSON, as the model writes it."""

    text: str


Piece = Content | CallBegun | Arguments


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join adjacent pieces of one kind, and drop empty ones."""
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
