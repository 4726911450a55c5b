"""An incremental scanner of one JSON value (RFC 8259): finds its end, or where it breaks."""

from __future__ import annotations

import enum
import re
from collections.abc import Callable

WHITE = " \t\n\r"
MAX_DEPTH = 64
"""Maximum depth of nested lists and objects. A deeper value is malformed."""
_PLAIN = re.compile(r'[^"\\\x00-\x1f]*')
_LITERAL = re.compile(r"[-+.0-9a-zA-Z]*")
_LITERALS = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][-+]?[0-9]+)?|true|false|null")
_MAX_LITERAL = 1024
"""Maximum number of characters of a number in JSON. A longer number is malformed."""


class _At(enum.Enum):
    VALUE = enum.auto()
    VALUE_OR_END = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    COLON = enum.auto()
    AFTER_VALUE = enum.auto()
    STRING = enum.auto()
    ESCAPE = enum.auto()
    UNICODE = enum.auto()
    LITERAL = enum.auto()


class JsonScanner:
    """Scans one JSON value, whose text arrives in parts. White space before the value belongs to
    it."""

    def __init__(self) -> None:
        self.complete = False
        self.broken = False
        self._at = _At.VALUE
        self._open: list[str] = []
        self._is_key = False
        self._digits = 0
        self._literal = ""
        # States in which white space counts.
        self._inner: dict[_At, Callable[[str, int], int]] = {
            _At.STRING: self._string,
            _At.ESCAPE: self._escape,
            _At.UNICODE: self._unicode,
            _At.LITERAL: self._number_or_word,
        }

    def take(self, text: str, start: int = 0) -> int:
        """Scan ``text``, the next part of the value, from the position ``start``. Return the
        position in ``text`` up to which it belongs to the value.

        The character at which a value breaks does not belong to it. A number ends with the first
        character after it.
        """
        place = start
        while place < len(text) and not (self.complete or self.broken):
            place = self._step(text, place)
        return place

    def _step(self, text: str, place: int) -> int:
        inner = self._inner.get(self._at)
        if inner is not None:
            return inner(text, place)
        character = text[place]
        if character in WHITE:
            return place + 1
        if self._at in {_At.VALUE, _At.VALUE_OR_END}:
            return self._value(character, place)
        if self._at in {_At.KEY, _At.KEY_OR_END}:
            return self._key(character, place)
        if self._at is _At.COLON:
            return self._expect(character == ":", _At.VALUE, place)
        return self._after_value(character, place)

    def _expect(self, right: bool, then: _At, place: int) -> int:
        if not right:
            self.broken = True
            return place
        self._at = then
        return place + 1

    def _value(self, character: str, place: int) -> int:
        if character == "]" and self._at is _At.VALUE_OR_END:
            return self._close(place)
        if character in "{[":
            self._open.append(character)
            then = _At.KEY_OR_END if character == "{" else _At.VALUE_OR_END
            return self._expect(len(self._open) <= MAX_DEPTH, then, place)
        if character == '"':
            self._is_key = False
            return self._expect(True, _At.STRING, place)
        if character in "-0123456789tfn":
            self._literal, self._at = "", _At.LITERAL
            return place
        return self._expect(False, self._at, place)

    def _key(self, character: str, place: int) -> int:
        if character == "}" and self._at is _At.KEY_OR_END:
            return self._close(place)
        self._is_key = True
        return self._expect(character == '"', _At.STRING, place)

    def _after_value(self, character: str, place: int) -> int:
        inside = self._open[-1]
        if character == ",":
            return self._expect(True, _At.KEY if inside == "{" else _At.VALUE, place)
        if character == ("}" if inside == "{" else "]"):
            return self._close(place)
        return self._expect(False, self._at, place)

    def _close(self, place: int) -> int:
        self._open.pop()
        self._value_ended()
        return place + 1

    def _value_ended(self) -> None:
        self.complete = not self._open
        self._at = _At.AFTER_VALUE

    def _string(self, text: str, place: int) -> int:
        found = _PLAIN.match(text, place)
        place = found.end() if found else place
        if place == len(text):
            return place
        if text[place] == "\\":
            return self._expect(True, _At.ESCAPE, place)
        if text[place] != '"':
            return self._expect(False, self._at, place)
        if self._is_key:
            self._at = _At.COLON
        else:
            self._value_ended()
        return place + 1

    def _escape(self, text: str, place: int) -> int:
        character = text[place]
        if character == "u":
            self._digits = 0
            return self._expect(True, _At.UNICODE, place)
        return self._expect(character in '"\\/bfnrt', _At.STRING, place)

    def _unicode(self, text: str, place: int) -> int:
        self._digits += 1
        then = _At.STRING if self._digits == 4 else _At.UNICODE
        return self._expect(text[place] in "0123456789abcdefABCDEF", then, place)

    def _number_or_word(self, text: str, place: int) -> int:
        found = _LITERAL.match(text, place)
        end = found.end() if found else place
        self._literal += text[place:end]
        if len(self._literal) > _MAX_LITERAL:
            self.broken = True
        elif end < len(text):
            if _LITERALS.fullmatch(self._literal) is None:
                self.broken = True
            else:
                self._value_ended()
        return end
