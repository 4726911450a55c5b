"""Values as models write them outside of JSON: Python's literals, and plain text."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection
from typing import Any

from router.dialects.json_scanner import MAX_DEPTH, WHITE

_WORDS = {"True": "true", "False": "false", "None": "null"}
_PLAIN_VALUE = re.compile(
    r"(?:[Tt]rue|[Ff]alse|None|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
    r"(?![0-9A-Za-z_.])"
)
_MAX_NUMBER = 1024
"""Maximum characters of a number."""
_KEYWORD = re.compile(r"""([^\s="'()\[\]{},]+)\s*=""")
_TYPES = {'"': "string", "[": "array", "{": "object", "t": "boolean", "f": "boolean", "n": "null"}
_PLAIN = re.compile(r"""[^"'\\]+""")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\n": ""} | {
    character: character for character in "\"'\\"
}


class NotALiteral(ValueError):
    """The text is no literal that JSON can hold."""


def json_of_literal(text: str) -> str:
    """A literal of Python or JSON as JSON. Raises NotALiteral."""
    reader = _Reader(text)
    found = reader.value()
    if reader.peek():
        raise NotALiteral
    return found


def keywords(text: str) -> list[tuple[str, str]]:
    """The keyword arguments of a call, each a name and JSON. Raises NotALiteral."""
    return _Reader(text).keywords()


def json_of_text(text: str, types: Collection[str]) -> str:
    """Plain text as JSON: the value that it is a literal of, if that is of one of ``types``.

    Else it is a string. Empty ``types`` allow every value.
    """
    try:
        found = json_of_literal(text)
    except NotALiteral:
        return json.dumps(text, ensure_ascii=False)
    kind = _TYPES.get(found[0]) or ("integer" if found.lstrip("-").isdecimal() else "number")
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return found if fits else json.dumps(text, ensure_ascii=False)


def type_of(value: Any) -> str:
    """The JSON type of a value, as schemas call it."""
    names: dict[type, str] = {
        **{bool: "boolean", int: "integer", float: "number", str: "string"},
        **{list: "array", dict: "object"},
    }
    return names.get(type(value), "null")


class _Reader:
    """Reads literals from the start of a text to its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0

    def peek(self) -> str:
        """The next character that is no white space; "" at the end."""
        place = self._place
        while place < len(self._text) and self._text[place] in WHITE:
            place += 1
        self._place = place
        return self._text[place : place + 1]

    def keywords(self) -> list[tuple[str, str]]:
        """Read the arguments between a call's parentheses."""
        found: dict[str, str] = {}
        while self.peek():
            name = _KEYWORD.match(self._text, self._place)
            if name is None or name[1] in found:
                raise NotALiteral
            self._place = name.end()
            found[name[1]] = self.value()
            if self.peek():
                self._expect(",")
        return list(found.items())

    def value(self) -> str:
        """Read a value. Returns it as JSON."""
        first = self.peek()
        if first in ('"', "'"):
            return json.dumps(self._string(), ensure_ascii=False)
        if first in ("[", "("):
            return f"[{', '.join(self._items(first, self.value))}]"
        if first == "{":
            return f"{{{', '.join(self._items(first, self._pair))}}}"
        found = _PLAIN_VALUE.match(self._text, self._place)
        if found is None or len(found[0]) > _MAX_NUMBER:
            raise NotALiteral
        self._place = found.end()
        return _WORDS.get(found[0], found[0])

    def _pair(self) -> str:
        if self.peek() not in ('"', "'"):
            raise NotALiteral
        key = json.dumps(self._string(), ensure_ascii=False)
        self._expect(":")
        return f"{key}: {self.value()}"

    def _items(self, opening: str, item: Callable[[], str]) -> list[str]:
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise NotALiteral
        closing = {"[": "]", "(": ")", "{": "}"}[opening]
        self._expect(opening)
        items = []
        while self.peek() != closing:
            items.append(item())
            if self.peek() != closing:
                self._expect(",")
        self._expect(closing)
        self._depth -= 1
        return items

    def _string(self) -> str:
        quote = self._text[self._place]
        self._place += 1
        parts = []
        while True:
            plain = _PLAIN.match(self._text, self._place)
            if plain is not None:
                parts.append(plain[0])
                self._place = plain.end()
            character = self._text[self._place : self._place + 1]
            if character == quote:
                self._place += 1
                break
            if character == "\\":
                parts.append(self._escape())
            elif character:
                parts.append(character)
                self._place += 1
            else:
                raise NotALiteral
        # Escapes may write an astral character as two surrogates; half of a pair is no text.
        try:
            return "".join(parts).encode("utf-16", "surrogatepass").decode("utf-16")
        except UnicodeDecodeError:
            raise NotALiteral from None

    def _escape(self) -> str:
        found = _ESCAPE.match(self._text, self._place)
        if found is None:
            raise NotALiteral
        self._place = found.end()
        code = found[1] or found[2]
        if code:
            return chr(int(code, 16))
        return _ESCAPED.get(found[3], found[0])

    def _expect(self, text: str) -> None:
        if self.peek() != text:
            raise NotALiteral
        self._place += 1
