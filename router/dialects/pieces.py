"""The pieces that a parser splits an answer's text into."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


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
