"""An incremental parser of calls in text, for all formats.

    OUTSIDE ── marker ──► ENTER ──► CALL ──► BEHIND ──► BETWEEN ──► TAIL ── closing ──► OUTSIDE
                            ▲        └► SPILL (broken arguments) ─────┘ │
                            └──────────── the next call ────────────────┘

Text that looks like a call but is not becomes content again, with its marker. A call that clients
have received cannot be withdrawn. If its arguments turn out to be malformed, the text up to the
next marker is added to them. So no text is lost, and no client mistakes the arguments for JSON.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from router.dialects.calls import MAX_HEAD_CHARACTERS, CallForm, CallReader
from router.dialects.json_calls import ObjectReader
from router.dialects.json_scanner import WHITE
from router.dialects.pieces import (
    Arguments,
    CallEnd,
    Content,
    SteppedParser,
    first_marker,
    possible_start,
)
from router.dialects.tools import Tool


@dataclass(frozen=True, slots=True)
class Markers:
    """How a format separates calls from text."""

    opening: str
    closing: str = ""
    """Marker that closes a block of tool calls; empty: the block ends with its last call."""
    also: tuple[str, ...] = ()
    """Texts that begin a tool call, and that open a block if the model omits ``opening``."""
    behind_call: tuple[str, ...] = ()
    """Markers after each tool call's arguments; any of them may be missing."""
    separators: str = ""
    """Characters allowed between tool calls, in addition to white space."""
    bare: str = ""
    """Characters with which an answer may begin a tool call without a marker."""
    repeats: bool = False
    """Whether calls may follow each other without a marker or separator."""


class _State(enum.Enum):
    START = enum.auto()
    OUTSIDE = enum.auto()
    ENTER = enum.auto()
    CALL = enum.auto()
    BEHIND = enum.auto()
    BETWEEN = enum.auto()
    TAIL = enum.auto()
    SPILL = enum.auto()


class ToolParser(SteppedParser):
    """An ``AnswerParser`` that finds tool calls. Text that may still begin a call is held back."""

    def __init__(
        self,
        markers: Markers,
        form: CallForm,
        other: CallForm | None,
        tools: Mapping[str, Tool],
    ) -> None:
        """Create a parser. Calls that are not JSON objects have the form ``other``; None: they too
        have ``form``.

        ``tools``: those that may be called, by name.
        """
        super().__init__()
        self._markers = markers
        self._other = other or form
        self._form = form
        self._tools = tools
        self._state = _State.START if markers.bare else _State.OUTSIDE
        self._raw = ""
        """Held text since the opening marker, or since the last tool call. It becomes content if no
        call follows."""
        self._space = ""
        """Held white space, which is content only if more content follows."""
        self._in_list = False
        self._called = False
        self._calls_here = False
        """Whether a tool call has followed the latest opening marker."""
        self._reader: CallReader = form.reader(tools)
        self._behind: tuple[str, ...] = ()
        """Markers that may still follow the tool call's arguments."""
        self._steps: dict[_State, Callable[[], bool]] = {
            _State.START: self._start,
            _State.OUTSIDE: self._outside,
            _State.ENTER: self._enter,
            _State.CALL: self._call,
            _State.BEHIND: self._skip_behind,
            _State.BETWEEN: self._between,
            _State.TAIL: self._tail,
            _State.SPILL: self._spill,
        }

    def _step(self) -> bool:
        return self._steps[self._state]()

    def _end(self, rest: str) -> None:
        if self._state is _State.SPILL:
            self._pieces.append(Arguments(rest))
        elif self._state is _State.CALL and self._reader.begun:
            self._reader.finish()
            self._pieces += self._reader.pieces()
            self._content(self._reader.raw)
        elif self._state is not _State.BETWEEN:
            held = self._reader.raw if self._state is _State.CALL else ""
            self._content(self._raw + held + rest)
            if not self._called:
                self._pieces.append(Content(self._space))

    def _content(self, text: str) -> None:
        shown = text.rstrip(WHITE)
        if shown:
            self._pieces.append(Content(self._space + shown))
            self._space = ""
        self._space += text[len(shown) :]

    def _give_up(self) -> None:
        """Turn the held text into content: it is not a tool call."""
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
        """Parse the beginning of the answer, where a tool call needs no marker."""
        self._take_white()
        if not self._text:
            return False
        if self._text[0] in self._markers.bare:
            self._state = _State.ENTER
        else:
            self._give_up()
        return True

    def _outside(self) -> bool:
        return self._to_marker((), self._content)

    def _tail(self) -> bool:
        """Parse the text after the last tool call, up to the closing marker."""
        return self._to_marker((self._markers.closing,), self._content)

    def _spill(self) -> bool:
        """Emit malformed arguments of a tool call as they are, up to the next marker."""
        ends = (*self._form.ends, *self._other.ends)
        if self._markers.closing:
            ends = (*ends, self._markers.closing)
        return self._to_marker(ends, lambda text: self._pieces.append(Arguments(text)))

    def _to_marker(self, ends: tuple[str, ...], give: Callable[[str], None]) -> bool:
        """Emit the text up to the first marker, by ``give``. A marker is one of ``ends``, or one
        that opens a block.

        Text that may be the beginning of a marker stays held back. Return whether a marker was
        found.
        """
        in_arguments = self._state is _State.SPILL
        openings = self._markers.also
        if not in_arguments or not self._markers.closing:
            openings = (self._markers.opening, *openings)
        place, marker = first_marker(self._text, (*ends, *openings))
        if not marker:
            cut = len(self._text) - possible_start(self._text, (*ends, *openings))
            give(self._text[:cut])
            self._text = self._text[cut:]
            return False
        give(self._text[:place])
        self._text = self._text[place:]
        if in_arguments:
            self._pieces.append(CallEnd())
        if marker in ends:
            self._text = self._text[len(marker) :]
            in_block = in_arguments and marker != self._markers.closing
            self._state = self._after_calls if in_block else _State.OUTSIDE
        elif marker == self._markers.opening:
            self._text = self._text[len(marker) :]
            self._raw, self._state = marker, _State.ENTER
            self._in_list = self._calls_here = False
        else:
            # The marker is part of the call. If the reader rejects the call, it does not see the
            # marker again.
            self._raw, self._in_list = "", False
            self._calls_here = self._state is not _State.OUTSIDE
            self._state = _State.ENTER
        return True

    def _enter(self) -> bool:
        """Parse the text after a marker or a separator: the next tool call, or the list around
        it."""
        self._take_white()
        if not self._text:
            return False
        first = self._text[0]
        if first == "{":
            self._enter_object()
        elif first == "[" and not (self._in_list or self._calls_here):
            self._in_list = True
            self._raw, self._text = self._raw + first, self._text[1:]
        elif first == "]" and self._in_list:
            self._end_list()
        else:
            self._enter_call(self._other.reader(self._tools))
        return True

    def _end_list(self) -> None:
        if self._raw.strip(WHITE) == "[":
            # Without a marker, an empty list cannot be distinguished from text.
            self._give_up()
            return
        self._raw, self._text = "", self._text[1:]
        self._state = self._after_calls

    def _enter_object(self) -> None:
        reader = self._form.reader(self._tools)
        if not isinstance(reader, ObjectReader):
            # Models of other formats sometimes write objects.
            reader = ObjectReader(self._tools, needs_arguments=True)
        self._enter_call(reader)

    def _enter_call(self, reader: CallReader) -> None:
        self._reader, self._state = reader, _State.CALL

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
            self._behind, self._state = self._markers.behind_call, _State.BEHIND
        elif reader.broken and not reader.begun:
            self._give_back(reader.raw)
        elif reader.broken and reader.in_arguments:
            self._text = reader.raw + self._text
            self._state = _State.SPILL
        elif reader.broken:
            self._pieces.append(CallEnd())
            self._give_back(reader.raw)
        return reader.complete or reader.broken

    def _give_back(self, raw: str) -> None:
        """Turn a marker without a tool call into content, and parse the text after it again."""
        if len(raw) > MAX_HEAD_CHARACTERS:
            # Do not parse a long text twice: the time would be quadratic.
            self._raw += raw
        elif self._raw:
            self._text = raw + self._text
        else:
            # Turn at least the first character into content, so that parsing makes progress.
            self._raw, self._text = raw[:1], raw[1:] + self._text
        self._give_up()

    def _skip_behind(self) -> bool:
        """Skip the markers that follow the arguments of a tool call."""
        self._take_white()
        for place, marker in enumerate(self._behind):
            if self._text.startswith(marker):
                self._raw, self._text = "", self._text[len(marker) :]
                self._behind = self._behind[place + 1 :]
                return True
            if marker.startswith(self._text):
                return False
        self._state = _State.BETWEEN
        return True

    def _between(self) -> bool:
        """Parse the text after a tool call: another call, or the end of the block."""
        self._take_white()
        if not self._text:
            return False
        first = self._text[0]
        if first == "{":
            self._enter_object()
        elif first in self._markers.separators or (first == "," and self._in_list):
            self._raw, self._text = self._raw + first, self._text[1:]
            self._state = _State.ENTER
        elif first == "]" and self._in_list:
            self._end_list()
        elif self._markers.repeats and not self._markers.closing.startswith(first):
            self._enter_call(self._other.reader(self._tools))
        else:
            self._give_up()
        return True
