"""The grammar that an answer must match, and the matcher that follows it token by token."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

_MAX_REASON_CHARACTERS = 300


class GrammarKind(enum.StrEnum):
    """The language in which a grammar is written."""

    JSON_OBJECT = "json_object"
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"
    CHOICE = "choice"
    LARK = "grammar"
    STRUCTURAL_TAG = "structural_tag"


@dataclass(frozen=True, slots=True)
class Grammar:
    """A grammar that an answer must match.

    ``text`` is a JSON schema as JSON, a regular expression, a JSON list of the strings to choose
    from, a structural tag as JSON, or a grammar in llguidance's dialect of Lark. A grammar without
    a rule ``start`` is GBNF. With ``JSON_OBJECT``, ``text`` is empty.
    """

    kind: GrammarKind
    text: str


class TokenMatcher(Protocol):
    """Follows one text through a grammar, token by token. After an error, the matcher stays in
    error.

    Used by one thread at a time.
    """

    def unsafe_compute_mask_ptr(self, trg_pointer: int, trg_byte_size: int) -> None:
        """Write the tokens that may follow as a bit mask: one bit per token id, lowest first, in
        32-bit words.

        If the text may end here, the mask includes the tokens that end it.
        """

    def consume_token(self, sampled_token: int) -> bool:
        """Advance the matcher by a token. Return False if the token may not follow; the matcher is
        then in error."""

    def rollback(self, num_tokens: int) -> bool:
        """Go back by ``num_tokens`` tokens, as if they had not been consumed."""

    def is_stopped(self) -> bool:
        """Whether the text is complete, so that only its end may follow."""

    def is_error(self) -> bool:
        """Whether the matcher is in error."""

    def get_error(self) -> str:
        """Return the message of the error that the matcher is in."""

    def deep_copy(self) -> TokenMatcher:
        """Return a copy of the matcher at the same position. Both share what they compute about the
        grammar."""


def reason_in(error: str) -> str:
    """Reduce an error of the grammar library to one line for a client."""
    line = " ".join(error.partition("<non-verbose/>")[0].split())
    if line.startswith("NoExtension"):
        return "no text matches it"
    if len(line) > _MAX_REASON_CHARACTERS:
        line = f"{line[:_MAX_REASON_CHARACTERS]}…"
    return line or "the library gives no reason"
