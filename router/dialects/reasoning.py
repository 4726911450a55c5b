"""Reasoning before an answer: how a model marks it, and a parser that separates it incrementally.

    BEFORE ── start ──► INSIDE ── end ──► AFTER ── text ──► REST (content and calls)
       └─────────────── other text ────────────────────────►┘

Reasoning occurs once, at the answer's start: a later marker is content. White space next to the
markers is dropped, but no other text.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from router.core.request import AnswerPart
from router.dialects.json_scanner import WHITE
from router.dialects.pieces import (
    AnswerParser,
    Reasoning,
    SteppedParser,
    first_marker,
    possible_start,
)


@dataclass(frozen=True, slots=True)
class ReasoningFormat:
    """How a model marks its reasoning."""

    name: str
    start: str
    """The marker at the answer's start, which a chat template may already write."""
    end: str
    calls_end_it: Sequence[str] = ()
    """Markers of tool calls that end the reasoning even without the marker ``end``."""
    answer: str = ""
    """Text that the model writes between ``end`` and the content. If it is not empty, reasoning may
    occur several times."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All markers of the reasoning. The parser needs their text even if they are special
        tokens."""
        return (self.start, self.end)

    def is_opened_by(self, prompt: str) -> bool:
        """Return whether the chat template has written ``start`` at the end of ``prompt``."""
        return prompt.rstrip(WHITE).endswith(self.start)

    def is_open_in(self, message: str) -> bool:
        """Return whether ``message``, an assistant's message that the answer continues, ends within
        its reasoning."""
        return message.rfind(self.start) > message.rfind(self.end)


class _State(enum.Enum):
    BEFORE = enum.auto()
    INSIDE = enum.auto()
    AFTER = enum.auto()
    REST = enum.auto()


class ReasoningParser(SteppedParser):
    """Separates an answer's reasoning, and passes the rest of the answer to another parser."""

    def __init__(
        self, form: ReasoningFormat, rest: AnswerParser, begins_in: AnswerPart = "start"
    ) -> None:
        """Create a parser; ``begins_in``: the part of the answer in which the prompt ends."""
        super().__init__()
        self._form = form
        self._rest = rest
        self._is_open = begins_in == "reasoning"
        self._state = _State.REST if begins_in == "content" else _State.BEFORE
        self._has_begun = False
        """Whether the reasoning has any text so far."""
        self._steps: dict[_State, Callable[[], bool]] = {
            _State.BEFORE: self._before,
            _State.INSIDE: self._inside,
            _State.AFTER: self._after,
            _State.REST: self._to_rest,
        }

    def _step(self) -> bool:
        return self._steps[self._state]()

    def _end(self, rest: str) -> None:
        inside = self._state is _State.INSIDE or (self._state is _State.BEFORE and self._is_open)
        if inside:
            self._pieces.append(Reasoning(rest))
        elif self._state is not _State.AFTER:
            self._pieces += self._rest.feed(rest)
        self._pieces += self._rest.finish()

    def _before(self) -> bool:
        text = self._text.lstrip(WHITE)
        if text.startswith(self._form.start):
            self._text = text[len(self._form.start) :]
            self._state = _State.INSIDE
        elif self._form.start.startswith(text):
            return False
        else:
            self._state = _State.INSIDE if self._is_open else _State.REST
        return True

    def _inside(self) -> bool:
        if not self._has_begun:
            self._text = self._text.lstrip(WHITE)
        ends = (self._form.end, *self._form.calls_end_it)
        place, end = first_marker(self._text, ends)
        if end:
            self._reason(self._text[:place].rstrip(WHITE))
            dropped = len(end) if end == self._form.end else 0
            self._text = self._text[place + dropped :]
            self._state = _State.AFTER
            return True
        keep = possible_start(self._text, ends)
        shown = self._text[: len(self._text) - keep].rstrip(WHITE)
        self._reason(shown)
        self._text = self._text[len(shown) :]
        return False

    def _reason(self, text: str) -> None:
        self._has_begun = self._has_begun or bool(text)
        self._pieces.append(Reasoning(text))

    def _after(self) -> bool:
        self._text = self._text.lstrip(WHITE)
        if self._text:
            self._state = _State.REST
        return bool(self._text)

    def _to_rest(self) -> bool:
        self._pieces += self._rest.feed(self._text)
        self._text = ""
        return False
