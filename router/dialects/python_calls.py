"""Calls and values in Python syntax: ``look_up(word="x", limit=2)``. For Llama 4 and Gemma.

Formats that write values between tags use only the values.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from router.dialects.calls import CallReader
from router.dialects.json_scanner import MAX_DEPTH, WHITE
from router.dialects.pieces import Arguments, CallStart, Piece
from router.dialects.rules import (
    check_kept,
    json_value,
    literal,
    properties_of,
    required_of,
    types_of,
)
from router.dialects.tools import Tool

_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_PLAIN = re.compile(r"""[^"'\\()\[\]{}]+""")
_PAIRS = {")": "(", "]": "[", "}": "{"}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_PLAIN_VALUE = re.compile(
    r"(?:[Tt]rue|[Ff]alse|None|null|-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][-+]?[0-9]+)?)"
    r"(?![0-9A-Za-z_.])"
)
_MAX_NUMBER = 1024
"""Maximum number of characters of a number."""
_KEYWORD = re.compile(r"""([^\s="'()\[\]{},]+)\s*=""")
_TYPES = {'"': "string", "[": "array", "{": "object", "t": "boolean", "f": "boolean", "n": "null"}
_PLAIN_TEXT = re.compile(r"""[^"'\\]+""")
_ESCAPE = re.compile(r"\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|(.))", re.DOTALL)
_ESCAPED = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "/": "/", "\n": ""} | {
    character: character for character in "\"'\\"
}


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """The form of tool calls with keyword arguments, which are literals of Python or JSON."""

    ends: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        """Create a reader of one tool call. ``tools`` are those that may be called, by name. See
        ``CallForm``."""
        return _PythonReader(tools)

    def write(self, name: str, arguments: Any) -> str:
        """Return the text of a tool call, as the model writes it. See ``CallForm``."""
        given = arguments.items() if isinstance(arguments, dict) else ()
        return f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in given)})"

    def rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """Return rules of a grammar for calls of ``tool``. See ``CallForm``. Required arguments
        come first, then the others, each in order."""
        properties = properties_of(tool)
        required = required_of(tool)
        check_kept(tool, tool.parameters)
        first = [key for key in properties if key in required]
        more = [key for key in properties if key not in required]
        rules, names = list[str](), dict[str, str]()
        for place, key in enumerate(properties):
            names[key] = f"{rule}_{place}"
            value = _value(properties[key], tool)
            rules.append(f"{names[key]}: {json.dumps(f'{key}=')} {value}")
        parts = ' ", " '.join(names[key] for key in first)
        # An optional argument includes the comma before it, unless it is the first one.
        tail = " ".join(f'(", " {names[key]})?' for key in more)
        if not first and more:
            parts, tail = f"{rule}_some?", ""
            for place, key in enumerate(more):
                rest = " ".join(f"{rule}_more_{place + 1}" for _ in more[place + 1 :][:1])
                choice = f"{rule}_some" if place == 0 else f"{rule}_some_{place}"
                other = f" | {rule}_some_{place + 1}" if place + 1 < len(more) else ""
                rules.append(f"{choice}: {names[key]} {rest}{other}")
                if place:
                    rules.append(f'{rule}_more_{place}: (", " {names[key]})? {rest}')
        opened = literal(f"{tool.name}(", special)
        return [f'{rule}: {opened} {parts} {tail} ")"', *rules]


def _literal(value: Any) -> str:
    return (
        repr(value)
        if value is None or isinstance(value, bool)
        else json.dumps(value, ensure_ascii=False)
    )


def _value(schema: Any, tool: Tool) -> str:
    """Return the part of a grammar rule that matches the value of an argument with this schema."""
    types = types_of(schema, tool.parameters)
    words = ['"True"', '"False"'] if "boolean" in types else []
    words += ['"None"'] if "null" in types else []
    if not types or types - {"boolean", "null"}:
        words.append(json_value(schema if isinstance(schema, dict) else {}, tool))
    return f"({' | '.join(words)})"


class _PythonReader:
    """Reads a whole tool call before it emits any part of the call: only then is the text certainly
    a call."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._pieces: list[Piece] = []
        self._texts: list[str] = []
        self._open: list[str] = []
        """Brackets that are open; the first one is the tool call's own parenthesis."""
        self._name = ""
        self._quote = ""
        self._escaped = False
        self.begun = False
        self.complete = False
        self.broken = False

    @property
    def raw(self) -> str:
        """The text that was read before the tool call began, or after its arguments. See
        ``CallReader``."""
        return "" if self.begun else self._name + "".join(self._texts)

    @property
    def in_arguments(self) -> bool:
        """Whether the tool call's arguments have begun and not ended. See ``CallReader``."""
        return False

    def pieces(self) -> list[Piece]:
        """Return the pieces of the answer that the reader has found since this method was last
        called. See ``CallReader``."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """Note that the answer ended within a tool call that has begun. ``pieces`` then returns the
        text that was held back. See ``CallReader``."""

    def take(self, text: str) -> int:
        """Read ``text``. Return how many of its characters belong to the tool call. See
        ``CallReader``."""
        place = 0
        while place < len(text) and not (self.complete or self.broken):
            place = self._step(text, place)
        return place

    def _step(self, text: str, place: int) -> int:
        character = text[place]
        if not self._open:
            return self._head(character, place)
        plain = None if self._escaped else _PLAIN.match(text, place)
        end = place + 1 if plain is None else plain.end()
        self._texts.append(text[place:end])
        if plain is None:
            self._mark(character)
        return end

    def _head(self, character: str, place: int) -> int:
        if character == "(" and self._name in self._tools:
            self._open.append(character)
            self._texts.append(character)
        elif _NAME.fullmatch(self._name + character):
            self._name += character
        else:
            self.broken = True
            return place
        return place + 1

    def _mark(self, character: str) -> None:
        """Process a quote, a bracket or a backslash, or the character after a backslash."""
        if self._escaped:
            self._escaped = False
        elif self._quote:
            self._escaped = character == "\\"
            if character == self._quote:
                self._quote = ""
        elif character in "\"'":
            self._quote = character
        elif character in _PAIRS:
            self.broken = self._open.pop() != _PAIRS[character]
            if not self._open and not self.broken:
                self._end()
        elif character in "([{":
            self._open.append(character)
            self.broken = len(self._open) > MAX_DEPTH
        else:
            self.broken = True

    def _end(self) -> None:
        inside = "".join(self._texts)[1:-1]
        try:
            given = keywords(inside)
        except NotALiteral:
            self.broken = True
            return
        written = ", ".join(
            f"{json.dumps(key, ensure_ascii=False)}: {value}" for key, value in given
        )
        self._pieces += [CallStart(self._name), Arguments(f"{{{written}}}")]
        self.begun = self.complete = True


class NotALiteral(ValueError):
    """Raised because a text is not a literal that JSON can represent."""


def json_of_literal(text: str) -> str:
    """Convert a literal of Python or JSON to JSON. Raises NotALiteral."""
    reader = _LiteralReader(text)
    found = reader.value()
    if reader.peek():
        raise NotALiteral
    return found


def keywords(text: str) -> list[tuple[str, str]]:
    """Return the keyword arguments of a tool call, each a name and JSON. Raises NotALiteral."""
    return _LiteralReader(text).keywords()


def json_of_text(text: str, types: Collection[str]) -> str:
    """Convert plain text to JSON: a literal of one of ``types``, or otherwise a string.

    Empty ``types`` allow every value.
    """
    try:
        found = json_of_literal(text)
    except NotALiteral:
        return json.dumps(text, ensure_ascii=False)
    kind = _TYPES.get(found[0]) or ("integer" if found.lstrip("-").isdecimal() else "number")
    fits = not types or kind in types or (kind == "integer" and "number" in types)
    return found if fits else json.dumps(text, ensure_ascii=False)


class _LiteralReader:
    """Reads literals from the start of a text to its end."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._place = 0
        self._depth = 0

    def peek(self) -> str:
        """Return the next character that is not white space, without reading it; "" at the end."""
        place = self._place
        while place < len(self._text) and self._text[place] in WHITE:
            place += 1
        self._place = place
        return self._text[place : place + 1]

    def keywords(self) -> list[tuple[str, str]]:
        """Read the keyword arguments between a tool call's parentheses. Return each as its name and
        its value as JSON."""
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
        """Read one literal. Return its value as JSON."""
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
            plain = _PLAIN_TEXT.match(self._text, self._place)
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
        # Escapes may write an astral character as two surrogates. An unpaired one is not text.
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
