"""Detokenizers: token ids to text, one token at a time, never splitting a character."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_MAX_PENDING = 8
"""Maximum tokens held back that end in half a character; a character has at most four bytes."""


class Detokenizer(Protocol):
    """Detokenizes one answer."""

    def step(self, token_id: int) -> str:
        """Take a token. Returns the characters that it completes, "" if none."""

    def flush(self) -> str:
        """Take the rest at the end: U+FFFD for bytes that are no character."""


class ByteDetokenizer:
    """For byte-level vocabularies: tokens are bytes, and text is their UTF-8 decoding."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For other vocabularies: decodes a window of tokens, and yields the text that is new in it.

    The window begins with the tokens shown last, because a decoder may treat the first token of a
    text in its own way: some drop a leading space. ``context`` is the prompt's end.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str],
        is_special: Callable[[int], bool],
        context: Sequence[int] = (),
    ) -> None:
        self._decode = decode
        self._is_special = is_special
        self._shown = [token for token in context if not is_special(token)]
        self._shown_text = decode(self._shown)
        if self._shown_text.endswith(REPLACEMENT):
            self._shown, self._shown_text = [], ""
        self._pending: list[int] = []

    def step(self, token_id: int) -> str:
        if self._is_special(token_id):
            return ""
        self._pending.append(token_id)
        text = self._new_text()
        if text.endswith(REPLACEMENT) and len(self._pending) < _MAX_PENDING:
            return ""
        # A token without text stays pending: it may still change how the next one is decoded.
        if text:
            self._advance()
        return text

    def flush(self) -> str:
        if not self._pending:
            return ""
        text = self._new_text()
        self._advance()
        return text

    def _new_text(self) -> str:
        text = self._decode(self._shown + self._pending)
        if text.startswith(self._shown_text):
            return text[len(self._shown_text) :]
        return self._decode(self._pending)

    def _advance(self) -> None:
        self._shown, self._pending = self._pending, []
        self._shown_text = self._decode(self._shown)


class MarkerDetokenizer:
    """Adds the text of some special tokens, by id: markers that a parser finds in the text."""

    def __init__(self, plain: Detokenizer, texts: Mapping[int, str]) -> None:
        self._plain = plain
        self._texts = texts

    def step(self, token_id: int) -> str:
        marker = self._texts.get(token_id)
        return self._plain.step(token_id) if marker is None else self._plain.flush() + marker

    def flush(self) -> str:
        return self._plain.flush()
