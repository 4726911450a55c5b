"""Tool calls whose arguments are a JSON object, and the readers of such calls.

ObjectCalls    {"name": "look_up", "arguments": {"word": "x"}}
NamedCalls     look_up[ARGS]{"word": "x"}    functions.look_up:0<|...|>{"word": "x"}
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from router.dialects.calls import NAME, CallReader, HeadReader, words
from router.dialects.json_scanner import WHITE, JsonScanner
from router.dialects.pieces import Arguments, CallStart, Piece
from router.dialects.rules import json_value, literal
from router.dialects.tools import Tool

_NAME_KEY = "name"
_ARGUMENT_KEYS = frozenset({"arguments", "parameters"})
_OTHER_KEYS = frozenset({"id", "type"})
"""Keys that some models add to the JSON object of a tool call, and that carry no information."""


class _At(enum.Enum):
    OPEN = enum.auto()
    KEY = enum.auto()
    KEY_OR_END = enum.auto()
    IN_KEY = enum.auto()
    COLON = enum.auto()
    VALUE = enum.auto()
    IN_VALUE = enum.auto()
    AFTER_VALUE = enum.auto()


_FRAME = {
    _At.OPEN: ("{", _At.KEY_OR_END),
    _At.COLON: (":", _At.VALUE),
    _At.AFTER_VALUE: (",", _At.KEY),
}
"""For each state of an ``ObjectReader``: the character that must come next, and the state after
it."""


class _Is(enum.Enum):
    """Meaning of the value that the current key of a tool call's object has."""

    NAME = enum.auto()
    ARGUMENTS = enum.auto()
    WRAPPED_ARGUMENTS = enum.auto()
    """The arguments of a tool call, written as null or as JSON within a string, as some models
    do."""
    OTHER = enum.auto()


class ObjectReader:
    """Reads one tool call that is a JSON object with a name and arguments, in any order."""

    def __init__(self, names: Collection[str], *, needs_arguments: bool) -> None:
        """Create a reader; ``names`` are those of the tools that may be called."""
        self._names = names
        self._needs_arguments = needs_arguments
        self._at = _At.OPEN
        self._scanner = JsonScanner()
        self._value = ""
        self._key = ""
        self._is = _Is.OTHER
        self._name: str | None = None
        self._has_arguments = False
        self._waiting = ""
        self._pieces: list[Piece] = []
        self.raw = ""
        self.begun = False
        self.complete = False
        self.broken = False

    @property
    def in_arguments(self) -> bool:
        """Whether the tool call's arguments have begun and not ended. See ``CallReader``."""
        return self.begun and self._at is _At.IN_VALUE and self._is is _Is.ARGUMENTS

    def pieces(self) -> list[Piece]:
        """Return the pieces of the answer that the reader has found since this method was last
        called. See ``CallReader``."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, text: str) -> int:
        """Read ``text``. Return how many of its characters belong to the tool call. See
        ``CallReader``."""
        place = 0
        while place < len(text) and not (self.complete or self.broken):
            begun, inside = self.begun, self.in_arguments
            end = self._step(text, place)
            if begun is self.begun and not inside:
                self.raw += text[place:end]
            place = end
        return place

    def finish(self) -> None:
        """Note that the answer ended within a tool call that has begun. ``pieces`` then returns the
        text that was held back. See ``CallReader``."""

    def _step(self, text: str, place: int) -> int:
        if self._at in {_At.IN_KEY, _At.IN_VALUE}:
            return self._scan(text, place)
        character = text[place]
        if character in WHITE:
            return place + 1
        if character == "}" and self._at in {_At.KEY_OR_END, _At.AFTER_VALUE}:
            return self._end(place)
        if self._at is _At.VALUE:
            return self._start_value(character, place)
        if self._at in {_At.KEY, _At.KEY_OR_END}:
            return self._start(_At.IN_KEY, place) if character == '"' else self._break(place)
        wanted, then = _FRAME[self._at]
        return self._expect(character == wanted, then, place)

    def _expect(self, right: bool, then: _At, place: int) -> int:
        if not right:
            return self._break(place)
        self._at = then
        return place + 1

    def _break(self, place: int) -> int:
        self.broken = True
        return place

    def _start(self, at: _At, place: int) -> int:
        self._scanner, self._value, self._at = JsonScanner(), "", at
        return place

    def _start_value(self, character: str, place: int) -> int:
        if self._key == _NAME_KEY and self._name is None:
            self._is = _Is.NAME
        elif self._key in _ARGUMENT_KEYS and not self._has_arguments:
            self._has_arguments = True
            self._is = _Is.ARGUMENTS if character == "{" else _Is.WRAPPED_ARGUMENTS
        elif self._key in _OTHER_KEYS:
            self._is = _Is.OTHER
        else:
            return self._break(place)
        self._start(_At.IN_VALUE, place)
        if self._is is _Is.ARGUMENTS and self._name is not None:
            self._begin(self._name)
        return place

    def _scan(self, text: str, place: int) -> int:
        end = self._scanner.take(text, place)
        taken = text[place:end]
        if self._at is _At.IN_VALUE and self._is is _Is.ARGUMENTS:
            if self.begun:
                self._pieces.append(Arguments(taken))
            else:
                self._waiting += taken
        else:
            self._value += taken
        if self._scanner.broken:
            return self._break(end)
        if self._scanner.complete:
            self._scanned()
        return end

    def _scanned(self) -> None:
        """Process a key or a value that has been read completely."""
        if self._at is _At.IN_KEY:
            self._key, self._at = json.loads(self._value), _At.COLON
            return
        self._at = _At.AFTER_VALUE
        if self._is is _Is.NAME:
            self._named(json.loads(self._value))
        elif self._is is _Is.WRAPPED_ARGUMENTS:
            self._unwrapped(json.loads(self._value))

    def _named(self, name: object) -> None:
        if not isinstance(name, str) or name not in self._names:
            self.broken = True
            return
        self._name = name
        if self._waiting:
            self._begin(name)

    def _unwrapped(self, arguments: object) -> None:
        inner = "{}" if arguments is None else arguments
        if not isinstance(inner, str) or not _is_object(inner):
            self.broken = True
            return
        self._waiting = inner
        if self._name is not None:
            self._begin(self._name)

    def _begin(self, name: str) -> None:
        self.begun, self.raw = True, ""
        self._pieces.append(CallStart(name))
        if self._waiting:
            self._pieces.append(Arguments(self._waiting))

    def _end(self, place: int) -> int:
        if self._name is None or (self._needs_arguments and not self._has_arguments):
            return self._break(place)
        if not self.begun:
            self._waiting = "{}"
            self._begin(self._name)
        self.complete = True
        return place + 1


def _is_object(text: str) -> bool:
    try:
        # An unpaired surrogate cannot be sent as UTF-8.
        text.encode()
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


@dataclass(frozen=True, slots=True)
class ObjectCalls:
    """The form of tool calls that are JSON objects with a name and arguments."""

    arguments_key: str = "arguments"
    """Key of the arguments in calls that are written. Readers accept both ``arguments`` and
    ``parameters``."""
    needs_arguments: bool = False
    """Whether an object with a name but without arguments is content, not a tool call."""
    ends: tuple[str, ...] = ()
    texts: tuple[str, ...] = ()

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        """Create a reader of one tool call. ``tools`` are those that may be called, by name. See
        ``CallForm``."""
        return ObjectReader(tools, needs_arguments=self.needs_arguments)

    def write(self, name: str, arguments: Any) -> str:
        """Return the text of a tool call, as the model writes it. See ``CallForm``."""
        return f"{self._opened(name)}{dump(arguments)}}}"

    def rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """Return rules of a grammar for calls of ``tool``. See ``CallForm``."""
        opened = literal(self._opened(tool.name), special)
        return [f'{rule}: {opened} {rule}_arguments "}}"', *arguments_rule(rule, tool)]

    def _opened(self, name: str) -> str:
        return f'{{"name": {dump(name)}, "{self.arguments_key}": '


@dataclass(frozen=True, slots=True)
class NamedCalls:
    """The form of tool calls that consist of a name and a JSON object of arguments, with markers
    around both."""

    before_name: tuple[str, ...] = ()
    """Markers before the name. Those of ``middle`` stand between name and arguments and may be
    missing; those of ``behind`` follow the arguments."""
    middle: tuple[str, ...] = ()
    behind: tuple[str, ...] = ()
    id_marker: str = ""
    """Marker of the tool call's id, which may precede ``middle``."""
    is_numbered: bool = False
    """Whether the name is written ``functions.look_up:0``, which is also the tool call's id."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers that end a tool call whose arguments are malformed. See ``CallForm``."""
        return tuple(text.strip() for text in self.behind[-1:])

    @property
    def texts(self) -> tuple[str, ...]:
        """All markers of the format; some may be special tokens. See ``CallForm``."""
        found = (*self.before_name, self.id_marker, *self.middle, *self.behind)
        return tuple(text.strip() for text in found if text)

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        """Create a reader of one tool call. ``tools`` are those that may be called, by name. See
        ``CallForm``."""
        return _NamedReader(self._head(), tools)

    def write(self, name: str, arguments: Any) -> str:
        """Return the text of a tool call, as the model writes it. See ``CallForm``."""
        written = f"functions.{name}:0" if self.is_numbered else name
        return self._around(written, dump(arguments))

    def rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """Return rules of a grammar for calls of ``tool``. See ``CallForm``."""
        before, between = (
            literal("".join(self.before_name), special),
            literal("".join(self.middle), special),
        )
        name = literal(tool.name, special)
        if self.is_numbered:
            name = f"{literal(f'functions.{tool.name}:', special)} /0|[1-9][0-9]?/"
        behind = literal("".join(self.behind), special)
        return [
            f"{rule}: {before} {name} {between} {rule}_arguments {behind}",
            *arguments_rule(rule, tool),
        ]

    def _around(self, name: str, arguments: str) -> str:
        before, between = "".join(self.before_name), "".join(self.middle)
        return f"{before}{name}{between}{arguments}{''.join(self.behind)}"

    def _head(self) -> re.Pattern[str]:
        name = NAME
        if self.is_numbered:
            name = rf"(?P<id>(?:functions\.)?{NAME}:[0-9]{{1,4}})"
        elif self.id_marker:
            name = rf"{NAME}(?:{re.escape(self.id_marker)}(?P<id>[A-Za-z0-9]{{0,64}}))?"
        return re.compile(
            words(self.before_name) + name + words(self.middle, optional=True) + r"(?=\{)"
        )


class _NamedReader(HeadReader):
    def _begin(self, tool: Tool) -> None:
        self._scanner = JsonScanner()

    def _take_arguments(self, text: str) -> int:
        end = self._scanner.take(text)
        self._give(text[:end])
        self.broken, self.complete = self._scanner.broken, self._scanner.complete
        return end

    def finish(self) -> None:
        """Note that the answer ended within a tool call that has begun. ``pieces`` then returns the
        text that was held back. See ``CallReader``."""


def dump(value: Any) -> str:
    """Encode ``value`` as JSON, with the spacing that models use."""
    return json.dumps(value, ensure_ascii=False)


def arguments_rule(rule: str, tool: Tool) -> list[str]:
    """Return a grammar rule, in a list, that matches the JSON object of a tool's arguments."""
    return [f"{rule}_arguments: {json_value({'type': 'object', **tool.parameters}, tool)}"]
