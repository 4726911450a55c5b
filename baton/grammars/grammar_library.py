"""Grammars compiled by llguidance, for one tokenizer.

Compiling takes about a millisecond, and finding which tokens may follow about ten microseconds. The
tokenizer that the library keeps takes 60 MiB for 49 thousand tokens, so this module is imported
when the first grammar arrives.

Compiling has no bounds of its own. Grammars of clients are proven first (grammar_prover).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import gbnf_to_lark

from baton.errors import InvalidGrammar
from baton.grammar import Grammar, GrammarKind, reason_in
from baton.grammars.finite_text import ENDLESS, lark_ends, schema_ends
from baton.grammars.json_schema import LIBRARY_OPTIONS, closed_text
from baton.grammars.structural_tag import structural_lark

MAX_GRAMMAR_BYTES = 128 << 10
"""Maximum size of a grammar's text, in bytes of UTF-8."""
_MAX_GBNF_BYTES = 8 << 10
"""Maximum size of a GBNF grammar, in bytes. Its conversion time grows with the square of its
length: 0.3 s for this size."""
_LARK = re.compile(r"^[ \t]*(%llguidance\b|start[ \t]*:)", re.MULTILINE)
_MAX_LEXER_STATES = 100_000
"""Maximum number of lexer states. They are found while texts are written, stay with the compiled
grammar, and take about 300 bytes each. A string of bounded length takes up to four for each
character."""


class GrammarCompiler:
    """Compiles grammars in one thread at a time. Any one thread may use a compiled grammar."""

    def __init__(self, tokenizer_json: str, vocab_size: int, eos_ids: Sequence[int]) -> None:
        """Create a compiler for the contents of a tokenizer.json. ``vocab_size`` is that of the
        model, which may have more token ids than the tokenizer.

        An answer ends with one of ``eos_ids``. The call takes 0.2 s for 49 thousand tokens. Raises
        ValueError for a tokenizer that the library cannot use.
        """
        self._has_end = bool(eos_ids)
        ends = list(eos_ids) or None
        try:
            self._tokenizer = LLTokenizer(tokenizer_json, n_vocab=vocab_size, eos_token=ends)
        except ValueError:
            # The library needs a tokenizer without ids beyond the model's.
            smaller = _with_ids_below(tokenizer_json, vocab_size)
            if smaller is None:
                raise
            self._tokenizer = LLTokenizer(smaller, n_vocab=vocab_size, eos_token=ends)

    def compile(self, grammar: Grammar) -> LLMatcher:
        """Compile a grammar, and return its matcher at the start of a text. Raises
        InvalidGrammar."""
        if not self._has_end:
            raise InvalidGrammar("this model has no end-of-sequence token to end an answer with")
        size = len(grammar.text.encode(errors="surrogatepass"))
        if size > MAX_GRAMMAR_BYTES:
            raise InvalidGrammar(f"it has {size} bytes; the limit is {MAX_GRAMMAR_BYTES}")
        limits = LLParserLimits(verbose_errors=False, max_lexer_states=_MAX_LEXER_STATES)
        try:
            text = _library_text(grammar)
            matcher = LLMatcher(self._tokenizer, text, log_level=0, limits=limits)
        except ValueError as error:  # the text is not JSON, or not Unicode
            raise InvalidGrammar(reason_in(str(error))) from None
        if not matcher.is_error():
            # A grammar that no text matches fails only when the first token is requested.
            matcher.compute_bitmask()
        if matcher.is_error():
            raise InvalidGrammar(reason_in(matcher.get_error()))
        return matcher


def _with_ids_below(tokenizer_json: str, vocab_size: int) -> str | None:
    """Return a tokenizer.json without the added tokens that the model has no embedding for; None if
    it has none of these. The model never draws such a token."""
    content = json.loads(tokenizer_json)
    added = content.get("added_tokens") or []
    left = [token for token in added if token["id"] < vocab_size]
    return json.dumps(content | {"added_tokens": left}) if len(left) < len(added) else None


def _library_text(grammar: Grammar) -> str:
    """Convert a grammar to the library's language. Raises ValueError."""
    match grammar.kind:
        case GrammarKind.JSON_OBJECT:
            return _schema('{"type": "object"}')
        case GrammarKind.JSON_SCHEMA:
            return _finite_schema(closed_text(grammar.text))
        case GrammarKind.REGEX:
            return LLMatcher.grammar_from_regex(grammar.text)
        case GrammarKind.CHOICE:
            # A JSON string in ASCII is also a string of Lark.
            texts = " | ".join(json.dumps(text) for text in json.loads(grammar.text))
            return LLMatcher.grammar_from_lark(f"start: {texts}")
        case GrammarKind.LARK:
            text = _lark(grammar.text)
            if not lark_ends(text):
                raise ValueError(ENDLESS)
            return LLMatcher.grammar_from_lark(text)
        case GrammarKind.STRUCTURAL_TAG:
            return LLMatcher.grammar_from_lark(structural_lark(grammar.text))


def _lark(text: str) -> str:
    """Return Lark text as it is. Text without a rule ``start`` is converted from GBNF."""
    if _LARK.search(text):
        return text
    if len(text) > _MAX_GBNF_BYTES:
        raise ValueError(f"it has no rule `start`, and GBNF is limited to {_MAX_GBNF_BYTES} bytes")
    try:
        return gbnf_to_lark(text)
    except Exception as error:  # the converter raises bare Exception, and RecursionError
        raise ValueError(f"it has no rule `start`, and is not GBNF: {error}") from None


def _finite_schema(text: str) -> str:
    """Convert a schema. One that is not JSON has the library's error."""
    try:
        ends = schema_ends(json.loads(text))
    except (ValueError, RecursionError):
        ends = True
    if not ends:
        raise ValueError(ENDLESS)
    return _schema(text)


def _schema(text: str) -> str:
    return LLMatcher.grammar_from_json_schema(text, overrides=LIBRARY_OPTIONS)
