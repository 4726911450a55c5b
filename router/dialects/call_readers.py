"""Incremental readers of one tool call, one for each way in which models write calls.

CallReader          {"name": "look_up", "arguments": {"word": "x"}}
NamedCallReader     look_up[ARGS]{"word": "x"}    look_up[CALL_ID]a1b2c3d4e[ARGS]{"word": "x"}

A reader takes text as it comes and yields pieces. A call has begun once its name is known, of an
object also the start of its arguments. Until then ``raw`` holds the text, and a reader that finds
no call of an offered tool is ``broken``.
"""

from __future__ import annotations

import enum
import json
import re
from collections.abc import Collection
from dataclasses import dataclass

from router.dialects.json_scanner import WHITE, JsonScanner
from router.dialects.pieces import Arguments, CallStart, Piece

_NAME_KEY = "name"
ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NUMBERED = re.compile(re.escape(CALL_ID) + r"[A-Za-z0-9]{0,64}")


@dataclass(frozen=True, slots=True)
class CallShape:
    """How a format writes a call as an object."""

    argument_keys: frozenset[str] = frozenset({"arguments", "parameters"})
    needs_arguments: bool = False
    """Whether an object without arguments is content, not a call."""


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
"""The character expected in a state, and the next state."""


class _Is(enum.Enum):
    """Meaning of the current key's value. A repeated key is ignored."""

    NAME = enum.auto()
    ARGUMENTS = enum.auto()
    WRAPPED_ARGUMENTS = enum.auto()
    """Null, or JSON within a string: some models write arguments so."""
    OTHER = enum.auto()


class CallReader:
    """Reads one call that is a JSON object with a name and arguments, in any order."""

    def __init__(self, names: Collection[str], shape: CallShape) -> None:
        """``names``: the tools that may be called."""
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
        """Whether arguments have begun and not ended."""
        return self.begun and self._at is _At.IN_VALUE and self._is is _Is.ARGUMENTS

    def pieces(self) -> list[Piece]:
        """Take the pieces found since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, text: str) -> int:
        """Read ``text``. Returns how many of its characters belong to the call."""
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
        """Use a complete key or value."""
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
        if self._name is None or (self._shape.needs_arguments and not self._has_arguments):
            return self._break(place)
        if not self.begun:
            self._waiting = "{}"
            self._begin(self._name)
        self.complete = True
        return place + 1


def _is_object(text: str) -> bool:
    try:
        # Half of a surrogate pair cannot be sent as UTF-8.
        text.encode()
        return isinstance(json.loads(text), dict)
    except (ValueError, RecursionError):
        return False


class NamedCallReader:
    """Reads one call that is a name and an object of arguments. The markers may be missing."""

    def __init__(self, names: Collection[str]) -> None:
        """``names``: the tools that may be called."""
        self._names = names
        self._scanner = JsonScanner()
        self._pieces: list[Piece] = []
        self.raw = ""
        self.begun = False
        self.complete = False
        self.broken = False

    @property
    def in_arguments(self) -> bool:
        """Whether arguments have begun and not ended."""
        return self.begun and not self.complete

    def pieces(self) -> list[Piece]:
        """Take the pieces found since the last call."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, text: str) -> int:
        """Read ``text``. Returns how many of its characters belong to the call."""
        place = 0
        while place < len(text) and not (self.begun or self.broken):
            place = self._step(text[place], place)
        return self._scan(text, place) if self.begun else place

    def _step(self, character: str, place: int) -> int:
        """Read one character of the name and the markers."""
        name = self.raw.partition("[")[0]
        if character == "{" and name in self._names and _is_whole(self.raw[len(name) :]):
            self.begun, self.raw = True, ""
            self._pieces.append(CallStart(name))
            return place
        if not _may_begin(self.raw + character):
            self.broken = True
            return place
        self.raw += character
        return place + 1

    def _scan(self, text: str, place: int) -> int:
        end = self._scanner.take(text, place)
        self._pieces.append(Arguments(text[place:end]))
        self.broken, self.complete = self._scanner.broken, self._scanner.complete
        return end


def _is_whole(markers: str) -> bool:
    """Whether the text between a name and its object is complete."""
    return _without_id(markers).rstrip(WHITE) in ("", ARGUMENTS)


def _may_begin(head: str) -> bool:
    """Whether ``head`` is the beginning of a call."""
    name, bracket, rest = head.partition("[")
    if _NAME.fullmatch(name) is None:
        return False
    markers = bracket + rest
    if CALL_ID.startswith(markers):
        return True
    return ARGUMENTS.startswith(_without_id(markers).rstrip(WHITE))


def _without_id(markers: str) -> str:
    numbered = _NUMBERED.match(markers)
    return markers if numbered is None else markers[numbered.end() :]
