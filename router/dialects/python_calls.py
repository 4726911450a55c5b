"""Calls that are written as in Python: ``look_up(word="x", limit=2)``. For Llama 4 and Gemma."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.dialects.calls import CallReader
from router.dialects.json_scanner import MAX_DEPTH
from router.dialects.literals import NotALiteral, keywords
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


@dataclass(frozen=True, slots=True)
class PythonCalls:
    """Calls with keyword arguments, which are literals of Python or JSON."""

    ends: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        """See ``CallForm``."""
        return _PythonReader(tools)

    def write(self, name: str, arguments: Any) -> str:
        """See ``CallForm``."""
        given = arguments.items() if isinstance(arguments, dict) else ()
        return f"{name}({', '.join(f'{key}={_literal(value)}' for key, value in given)})"

    def rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """See ``CallForm``. Required arguments come first, then the others, each in order."""
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
        # An argument that may be missing brings the comma before it, unless it is the first one.
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
    """The part of a rule that matches an argument."""
    types = types_of(schema, tool.parameters)
    words = ['"True"', '"False"'] if "boolean" in types else []
    words += ['"None"'] if "null" in types else []
    if not types or types - {"boolean", "null"}:
        words.append(json_value(schema if isinstance(schema, dict) else {}, tool))
    return f"({' | '.join(words)})"


class _PythonReader:
    """Reads a whole call before it gives any of it: only then is it certain that it is one."""

    def __init__(self, tools: Mapping[str, Tool]) -> None:
        self._tools = tools
        self._pieces: list[Piece] = []
        self._texts: list[str] = []
        self._open: list[str] = []
        """Brackets that are open, the call's own first."""
        self._name = ""
        self._quote = ""
        self._escaped = False
        self.begun = False
        self.complete = False
        self.broken = False

    @property
    def raw(self) -> str:
        """See ``CallReader``."""
        return "" if self.begun else self._name + "".join(self._texts)

    @property
    def in_arguments(self) -> bool:
        """See ``CallReader``."""
        return False

    def pieces(self) -> list[Piece]:
        """See ``CallReader``."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def finish(self) -> None:
        """See ``CallReader``."""

    def take(self, text: str) -> int:
        """See ``CallReader``."""
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
        """A quote, a bracket or a backslash, or what follows a backslash."""
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
