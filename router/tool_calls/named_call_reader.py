"""Reads one call that is a name and an object, while it is being written.

look_up[ARGS]{"word": "x"}      look_up[CALL_ID]a1b2c3d4e[ARGS]{"word": "x"}
"""

from __future__ import annotations

import re
from collections.abc import Collection

from router.tool_calls.json_scanner import WHITE, JsonScanner
from router.tool_calls.pieces import Arguments, CallBegun, Piece

ARGUMENTS, CALL_ID = "[ARGS]", "[CALL_ID]"
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NUMBERED = re.compile(re.escape(CALL_ID) + r"[A-Za-z0-9]{0,64}")


class NamedCallReader:
    """The state of one call, as ``router.tool_calls.call_reader.CallReader`` has it.

    The markers may be missing: a name may stand next to its object.
    """

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._scanner = JsonScanner()
        self._pieces: list[Piece] = []
        self.raw = ""
        self.begun = False
        self.complete = False
        self.broken = False

    @property
    def in_arguments(self) -> bool:
        """Arguments are being given out, and have not ended."""
        return self.begun and not self.complete

    def pieces(self) -> list[Piece]:
        """What is new since the last time."""
        pieces, self._pieces = self._pieces, []
        return pieces

    def take(self, text: str) -> int:
        """Follow ``text``: how far it belongs to the call."""
        place = 0
        while place < len(text) and not (self.begun or self.broken):
            place = self._step(text[place], place)
        return self._scan(text, place) if self.begun else place

    def _step(self, character: str, place: int) -> int:
        """Before the arguments."""
        name = self.raw.partition("[")[0]
        if character == "{" and name in self._names and _is_whole(self.raw[len(name) :]):
            self.begun, self.raw = True, ""
            self._pieces.append(CallBegun(name))
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
    """Whether what stands between a name and its object is all that there may be."""
    return _without_id(markers).rstrip(WHITE) in ("", ARGUMENTS)


def _may_begin(head: str) -> bool:
    """Whether a call may begin so."""
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
