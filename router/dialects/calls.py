"""One tool call: how a format of tool calls writes it, and how it is read while the model generates
it."""

from __future__ import annotations

import abc
import re
from collections.abc import Mapping
from typing import Any, Protocol

from router.dialects.pieces import Arguments, CallStart, Piece
from router.dialects.tools import Tool

NAME = r"(?P<name>[A-Za-z0-9_-]{1,64})"
"""Regular expression that matches the name of a tool."""
MAX_HEAD_CHARACTERS = 512
"""Maximum number of characters of a tool call before its arguments. A text with a longer head is
not a call."""


class CallReader(Protocol):
    """Reads one tool call, whose text arrives in parts, up to the end of its arguments.

    A call has begun once the text certainly is a call: from then on the reader returns pieces of
    the call. A reader that finds no call of an offered tool is ``broken``.
    """

    begun: bool
    complete: bool
    broken: bool

    @property
    def raw(self) -> str:
        """The text that was read before the tool call began, or after its arguments; or that was
        held back when something broke the arguments."""

    @property
    def in_arguments(self) -> bool:
        """Whether the tool call's arguments have begun and not ended."""

    def take(self, text: str) -> int:
        """Read ``text``. Return how many of its characters belong to the tool call."""

    def pieces(self) -> list[Piece]:
        """Return the pieces of the answer that the reader has found since this method was last
        called."""

    def finish(self) -> None:
        """Note that the answer ended within a tool call that has begun. ``pieces`` then returns the
        text that was held back."""


class CallWriter(Protocol):
    """How a format writes one tool call, and the grammar that makes a model write calls in that
    form."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All markers of the format; some may be special tokens."""

    def write(self, name: str, arguments: Any) -> str:
        """Return the text of a tool call, as the model writes it."""

    def rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """Return rules of a grammar for calls of ``tool``. The first one, named ``rule``, matches
        what ``write`` returns.

        ``special``: ids of the markers that are special tokens. Raises InvalidRequest for a strict
        tool whose schema cannot be fully enforced.
        """


class CallForm(CallWriter, Protocol):
    """The form of one tool call in a format. The same declaration reads calls, writes them, and
    gives their grammar."""

    @property
    def ends(self) -> tuple[str, ...]:
        """Markers that end a tool call whose arguments are malformed."""

    def reader(self, tools: Mapping[str, Tool]) -> CallReader:
        """Create a reader of one tool call. ``tools`` are those that may be called, by name."""


class HeadReader(abc.ABC):
    """Reads calls that begin with a name between markers, found by a regular expression."""

    def __init__(self, head: re.Pattern[str], tools: Mapping[str, Tool]) -> None:
        """Create a reader. ``head`` matches the text before a tool call's arguments; it has a group
        ``name``, and optionally a group ``id``."""
        self._head = head
        self._tools = tools
        self._pieces: list[Piece] = []
        self.raw = ""
        self.begun = False
        self.complete = False
        self.broken = False

    @property
    def in_arguments(self) -> bool:
        """Whether the tool call's arguments have begun and not ended. See ``CallReader``."""
        return self.begun and not self.complete

    def pieces(self) -> list[Piece]:
        """Return the pieces of the answer that the reader has found since this method was last
        called. See ``CallReader``."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, text: str) -> int:
        """Read ``text``. Return how many of its characters belong to the tool call. See
        ``CallReader``."""
        if self.begun:
            return self._take_arguments(text)
        known = len(self.raw)
        end = self._take_head(text)
        if not self.begun:
            return end
        # The head may end before ``text`` begins: the end is known only once a tag is complete.
        earlier, self.raw = self.raw[end:known], ""
        taken = max(0, end - known)
        return taken + self._take_arguments(earlier + text[taken:]) - len(earlier)

    @abc.abstractmethod
    def finish(self) -> None:
        """Note that the answer ended within a tool call that has begun. ``pieces`` then returns the
        text that was held back. See ``CallReader``."""

    @abc.abstractmethod
    def _begin(self, tool: Tool) -> None:
        """Prepare for reading the arguments of a call of ``tool``."""

    @abc.abstractmethod
    def _take_arguments(self, text: str) -> int:
        """Read ``text``, which begins within the arguments of a tool call. Return how many of its
        characters belong to them."""

    def _take_head(self, text: str) -> int:
        """Read the head of a tool call: the text before its arguments. Return the position in
        ``raw`` at which the head ends; if it has not ended, how many characters of ``text`` were
        taken."""
        room = MAX_HEAD_CHARACTERS - len(self.raw)
        self.raw += text[:room]
        found = self._head.match(self.raw)
        if found is None:
            self.broken = len(self.raw) == MAX_HEAD_CHARACTERS
            return min(room, len(text))
        tool = self._tools.get(found["name"])
        if tool is None:
            self.broken = True
            return min(room, len(text))
        self.begun = True
        self._pieces.append(CallStart(tool.name, found.groupdict().get("id") or ""))
        self._begin(tool)
        return found.end()

    def _give(self, text: str) -> None:
        self._pieces.append(Arguments(text))


def words(texts: tuple[str, ...], *, optional: bool = False) -> str:
    """Return a regular expression that matches markers, one after the other, with any white space
    around each."""
    mark = "?" if optional else ""
    return r"\s*+" + "".join(rf"(?:{re.escape(text.strip())}){mark}\s*+" for text in texts)
