"""The grammar that an answer must match, and the matcher that follows it token by token."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

_MAX_REASON_CHARACTERS = 300


class GrammarKind(enum.StrEnum):
    """What a grammar's text is written in."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """``text`` is a JSON schema as JSON, a regular expression, a JSON list of the strings to choose

    from, a grammar in llguidance's dialect of Lark (or in GBNF, where it has no rule ``start``), or
    a structural tag as JSON; of ``JSON_OBJECT`` it is empty.
    """

    kind: GrammarKind
    text: str


class TokenMatcher(Protocol):
    """Follows one text through a grammar, token by token; once broken it stays so.

    Used by one thread at a time.
    """

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        """Write which tokens may follow: a bit each, from the lowest up, in words of 32.

        Where the text may end, the tokens that end it are among them.
        """

    def consume_token(self, sampled_token: int) -> bool:
        """Go on by a token; false where it may not follow, which breaks the matcher."""

    def rollback(self, num_tokens: int) -> bool:
        """Take the latest tokens back."""

    def is_stopped(self) -> bool:
        """Whether nothing may follow but the end."""

    def is_error(self) -> bool:
        """Whether it is broken."""

    def get_error(self) -> str:
        """Why it is."""

    def deep_copy(self) -> TokenMatcher:
        """A copy at the same place. Both share what they compute of the grammar."""


def reason_in(error: str) -> str:
    """Reduce an error of the grammar library to one line for a client."""
    line = " ".join(error.partition("<non-verbose/>")[0].split())
    if line.startswith("NoExtension"):
        return "no text matches it"
    if len(line) > _MAX_REASON_CHARACTERS:
        line = f"{line[:_MAX_REASON_CHARACTERS]}…"
    return line or "the library does not say why"
