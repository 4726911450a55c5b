"""Reads one call, a JSON object with a name and arguments, while it is being written."""

from __future__ import annotations

import enum
import json
from collections.abc import Collection
from dataclasses import dataclass

from router.tool_calls.json_scanner import WHITE, JsonScanner
from router.tool_calls.pieces import Arguments, CallBegun, Piece

_NAME_KEY = "name"


@dataclass(frozen=True, slots=True)
class CallShape:
    """What the objects of a format look like."""

    argument_keys: frozenset[str] = frozenset({"arguments", "parameters"})
    needs_arguments: bool = False
    """An object without arguments is no call."""


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
"""The character that leads on, and where it leads."""


class _Is(enum.Enum):
    """What the value of the present key means. Of a key's second value nothing is made."""

    NAME = enum.auto()
    ARGUMENTS = enum.auto()
    WRAPPED_ARGUMENTS = enum.auto()
    """Null, or JSON within a string, as some models write them."""
    OTHER = enum.auto()


class CallReader:
    """The state of one call. It has begun once its name and the start of its arguments are known.

    Until then ``raw`` holds the text; an object that is not a call of one of ``names`` is broken.
    """

    def __init__(self, names: Collection[str], shape: CallShape) -> None:
        self._names = names
        self._shape = shape
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
        """Arguments are being given out, and have not ended."""
        return self.begun and self._at is _At.IN_VALUE and self._is is _Is.ARGUMENTS

    def pieces(self) -> list[Piece]:
        """What is new since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, text: str) -> int:
        """Follow ``text``: how far it belongs to the call."""
        place = 0
        while place < len(text) and not (self.complete or self.broken):
            place = self._step(text, place)
        if not self.begun:
            self.raw += text[:place]
        return place

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
        self._is = _Is.OTHER
        if self._key == _NAME_KEY and self._name is None:
            self._is = _Is.NAME
        elif self._key in self._shape.argument_keys and not self._has_arguments:
            self._has_arguments = True
            self._is = _Is.ARGUMENTS if character == "{" else _Is.WRAPPED_ARGUMENTS
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
        """A key or a value is whole."""
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
        self._pieces.append(CallBegun(name))
        if self._waiting:
            self._pieces.append(Arguments(self._waiting))

    def _end(self, place: int) -> int:
        if self._name is None or (self._shape.needs_arguments and not self._has_arguments):
            return self._break(place)
        if not self.begun:
            self._waiting = "{}"
            self._begin(self._name)
        self.complete = True
        return place + 1


def _is_object(text: str) -> bool:
    try:
        # Half of a surrogate pair cannot be sent to anybody.
        text.encode()
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False
