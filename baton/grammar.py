"""What an answer must look like: plain data, compiled where it is used."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GrammarKind(enum.StrEnum):
    """How the text of a grammar is to be read."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "grammar"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A constraint on the whole answer.

    ``text`` is the schema as JSON for ``JSON_SCHEMA``, a JSON list of strings for ``CHOICE``, empty
    for ``JSON_OBJECT``, and the expression itself for the others.
    """

    kind: GrammarKind
    text: str
