"""An incremental parser of tool calls, for all formats: JSON objects after a marker.

    OUTSIDE ── marker ──► ENTER ──{──► CALL ──► BETWEEN ──► (CALL …) ──► TAIL ── closing ──► OUTSIDE
                                        └──► SPILL (arguments that are no JSON) ── closing ──┘

Text that looks like a call and is none becomes content again, with its marker. A call that clients
have seen cannot be taken back: if its arguments break, the text up to the closing marker belongs to
them. So no text is lost, and no client takes the arguments for JSON.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection
from dataclasses import dataclass

from router.dialects.call_readers import CallReader, CallShape, NamedCallReader
from router.dialects.json_scanner import WHITE
from router.dialects.pieces import Arguments, CallEnd, Content, Piece, joined
from router.dialects.reasoning import possible_start


@dataclass(frozen=True, slots=True)
class Markers:
    """How a format separates calls from text."""

    opening: str
    closing: str = ""
    """Empty: the block ends with its last call."""
    separators: str = ""
    """Characters allowed between calls, besides white space."""
    bare: bool = False
    """Whether an answer may begin with a call without a marker."""
    named: bool = False
    """Whether a call may also be a name and an object of arguments."""


class _State(enum.Enum):
    START = enum.auto()
    OUTSIDE = enum.auto()
    ENTER = enum.auto()
    CALL = enum.auto()
    BETWEEN = enum.auto()
    TAIL = enum.auto()
    SPILL = enum.auto()


class ToolParser:
    """Parses one answer, whose text comes in parts.

    Adjacent pieces of a kind join to the same text however the answer is cut into parts. Text that
    may still begin a call is held back.
    """

    def __init__(self, markers: Markers, shape: CallShape, names: Collection[str]) -> None:
        self._markers = markers
        self._shape = shape
        self._names = names
        self._state = _State.START if markers.bare else _State.OUTSIDE
        self._text = ""
        self._raw = ""
        """Text since the marker, or since the last call, that may turn out to be content."""
        self._space = ""
        """White space that is content only before more content."""
        self._in_list = False
        self._called = False
        self._calls_here = False
        """Whether a call has come since the marker."""
        self._reader: CallReader | NamedCallReader = CallReader(names, shape)
        self._pieces: list[Piece] = []
        self._steps: dict[_State, Callable[[], bool]] = {
            _State.START: self._start,
            _State.OUTSIDE: self._outside,
            _State.ENTER: self._enter,
            _State.CALL: self._call,
            _State.BETWEEN: self._between,
            _State.TAIL: self._tail,
            _State.SPILL: self._spill,
        }

    def feed(self, text: str) -> list[Piece]:
        """Parse the next part. Returns the pieces that are certain now."""
        self._text += text
        while self._text and self._steps[self._state]():
            pass
        return self._given()

    def finish(self) -> list[Piece]:
        """End the text. Returns what was held back."""
        rest, self._text = self._text, ""
        if self._state is _State.SPILL:
            self._pieces.append(Arguments(rest))
        elif self._state is not _State.BETWEEN and not self._in_begun_call:
            held = self._reader.raw if self._state is _State.CALL else ""
            self._content(self._raw + held + rest)
            if not self._called:
                self._pieces.append(Content(self._space))
        return self._given()

    @property
    def _in_begun_call(self) -> bool:
        return self._state is _State.CALL and self._reader.begun

    def _given(self) -> list[Piece]:
        pieces, self._pieces = self._pieces, []
        return joined(pieces)

    def _content(self, text: str) -> None:
        shown = text.rstrip(WHITE)
        if shown:
            self._pieces.append(Content(self._space + shown))
            self._space = ""
        self._space += text[len(shown) :]

    def _give_up(self) -> None:
        """Make content of the text that was held back."""
        raw, self._raw = self._raw, ""
        self._content(raw)
        self._state = self._after_calls if self._calls_here else _State.OUTSIDE

    @property
    def _after_calls(self) -> _State:
        return _State.TAIL if self._markers.closing else _State.OUTSIDE

    def _take_white(self) -> None:
        rest = self._text.lstrip(WHITE)
        self._raw += self._text[: len(self._text) - len(rest)]
        self._text = rest

    def _start(self) -> bool:
        """At the beginning of the answer, where a call needs no marker."""
        self._take_white()
        if not self._text:
            return False
        if self._text[0] == "{":
            self._enter_call()
        else:
            self._give_up()
        return True

    def _outside(self) -> bool:
        found = self._until((self._markers.opening,), self._content)
        if found:
            self._open()
        return bool(found)

    def _tail(self) -> bool:
        """After the last call, up to the closing marker."""
        found = self._until((self._markers.closing, self._markers.opening), self._content)
        if found == self._markers.opening:
            self._open()
        elif found:
            self._state = _State.OUTSIDE
        return bool(found)

    def _spill(self) -> bool:
        closing = (self._markers.closing,) if self._markers.closing else ()
        found = self._until(closing, lambda text: self._pieces.append(Arguments(text)))
        if found:
            self._pieces.append(CallEnd())
            self._state = _State.OUTSIDE
        return bool(found)

    def _until(self, markers: tuple[str, ...], give: Callable[[str], None]) -> str:
        """Give the text before the first of ``markers``, and drop both. Returns the marker, or "".

        Text that may be the beginning of a marker stays.
        """
        places = [(self._text.find(marker), marker) for marker in markers]
        found = min((pair for pair in places if pair[0] >= 0), default=None)
        if found is not None:
            place, marker = found
            give(self._text[:place])
            self._text = self._text[place + len(marker) :]
            return marker
        keep = max((possible_start(self._text, marker) for marker in markers), default=0)
        cut = len(self._text) - keep
        give(self._text[:cut])
        self._text = self._text[cut:]
        return ""

    def _open(self) -> None:
        self._raw, self._state = self._markers.opening, _State.ENTER
        self._in_list = self._calls_here = False

    def _enter(self) -> bool:
        """After a marker or a separator: the next call, or the list around it."""
        self._take_white()
        if not self._text:
            return False
        first = self._text[0]
        if first == "{":
            self._enter_call()
        elif first == "[" and not (self._in_list or self._calls_here):
            self._in_list = True
            self._raw, self._text = self._raw + first, self._text[1:]
        elif first == "]" and self._in_list:
            self._end_list()
        elif self._markers.named and not self._in_list:
            self._reader, self._state = NamedCallReader(self._names), _State.CALL
        else:
            self._give_up()
        return True

    def _end_list(self) -> None:
        self._raw, self._text = "", self._text[1:]
        self._state = self._after_calls

    def _enter_call(self) -> None:
        self._reader = CallReader(self._names, self._shape)
        self._state = _State.CALL

    def _call(self) -> bool:
        reader = self._reader
        taken = reader.take(self._text)
        self._text = self._text[taken:]
        self._pieces += reader.pieces()
        if reader.begun:
            self._raw = self._space = ""
            self._called = self._calls_here = True
        if reader.complete:
            self._pieces.append(CallEnd())
            self._state = _State.BETWEEN
        elif reader.broken and not reader.begun:
            self._raw += reader.raw
            self._give_up()
        elif reader.broken and reader.in_arguments:
            self._state = _State.SPILL
        elif reader.broken:
            self._pieces.append(CallEnd())
            self._state = self._after_calls
        return reader.complete or reader.broken

    def _between(self) -> bool:
        """After a call: another one, or the end."""
        self._take_white()
        if not self._text:
            return False
        first = self._text[0]
        if first == "{":
            self._enter_call()
        elif first in self._markers.separators or (first == "," and self._in_list):
            self._raw, self._text = self._raw + first, self._text[1:]
            self._state = _State.ENTER
        elif first == "]" and self._in_list:
            self._end_list()
        else:
            self._give_up()
        return True
