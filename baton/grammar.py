"""What the text of an answer must match."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class GrammarKind(enum.StrEnum):
    """What a grammar's text is written in."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "grammar"


@dataclass(frozen=True, slots=True)
class Grammar:
    """``text`` is a JSON schema as JSON, a regular expression, a JSON list of the strings to choose

    from, or a grammar in llguidance's dialect of Lark (or in GBNF, where it has no rule ``start``);
    of ``JSON_OBJECT`` it is empty.
    """

    kind: GrammarKind
    text: str
