"""Token ids to text, token by token, without ever cutting a character in two."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

REPLACEMENT = "\ufffd"
_MAX_PENDING = 8
"""Tokens held back while they end in half a character; a character has at most four bytes."""


class Detokenizer(Protocol):
    """The state of one answer's text."""

    def step(self, token_id: int) -> str:
        """The characters that this token completes; "" while a character is incomplete."""

    def flush(self) -> str:
        """What is left at the end: U+FFFD for bytes that are no character."""


class ByteDetokenizer:
    """For byte-level vocabularies: a token is bytes, and text is their UTF-8 decoding."""

    def __init__(self, token_bytes: Callable[[int], bytes]) -> None:
        self._token_bytes = token_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def step(self, token_id: int) -> str:
        return self._decoder.decode(self._token_bytes(token_id))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class WindowDetokenizer:
    """For any other vocabulary: decode a window of tokens and show what is new in it.

    The window begins with the tokens shown last, because a decoder may treat the first token of a
    text unlike the others (it drops a leading space, say). ``context`` is the prompt's end.
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
    """Shows some special tokens, by id and text, which are else skipped: the markers of a format
    that somebody reads out of the text."""

    def __init__(self, plain: Detokenizer, texts: Mapping[int, str]) -> None:
        self._plain = plain
        self._texts = texts

    def step(self, token_id: int) -> str:
        marker = self._texts.get(token_id)
        return self._plain.step(token_id) if marker is None else self._plain.flush() + marker

    def flush(self) -> str:
        return self._plain.flush()
