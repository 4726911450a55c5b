"""The content blocks of a message while it is generated, and their events."""

from __future__ import annotations

import json
import secrets
from typing import Any

from router.core.request import AnswerPart
from router.dialects.dialect import Dialect
from router.dialects.output import ParsedOutput
from router.dialects.pieces import Arguments, CallEnd, CallStart, Content, Piece, Reasoning
from router.dialects.tools import ToolUse

Fields = dict[str, Any]


class MessageOutput:
    """The content blocks of one answer while it is generated. Blocks of reasoning, of text and of
    calls alternate.

    Blocks of reasoning have an empty signature, since Baton does not sign reasoning.
    """

    def __init__(self, dialect: Dialect, use: ToolUse | None, begins_in: AnswerPart) -> None:
        """Create the state before the first text. ``begins_in`` is the part of the answer in which
        the prompt ends."""
        self._output = ParsedOutput(dialect, use, begins_in)
        self._blocks: list[Fields] = []
        self._is_open = False

    @property
    def has_calls(self) -> bool:
        return any(block["type"] == "tool_use" for block in self._blocks)

    @property
    def content(self) -> list[Fields]:
        """The blocks of the answer in their final form."""
        return [_shown(block) for block in self._blocks]

    def feed(self, text: str, *, last: bool) -> list[Fields]:
        """Add the next part of the answer's text, and return its events. ``last``: no more text
        follows."""
        pieces = self._output.feed(text, last=last)
        events = [event for piece in pieces for event in self._events_of(piece)]
        return [*events, *self._close()] if last else events

    def _events_of(self, piece: Piece) -> list[Fields]:
        match piece:
            case Content(text):
                begin = [] if self._in("text") else self._open({"type": "text", "text": ""})
                self._blocks[-1]["text"] += text
                return [*begin, self._delta({"type": "text_delta", "text": text})]
            case CallStart(name):
                number = f"toolu_{secrets.token_hex(12)}"
                return self._open({"type": "tool_use", "id": number, "name": name, "input": ""})
            case Arguments(text):
                self._blocks[-1]["input"] += text
                return [self._delta({"type": "input_json_delta", "partial_json": text})]
            case CallEnd():
                return self._close()
            case Reasoning(text):
                block = {"type": "thinking", "thinking": "", "signature": ""}
                begin = [] if self._in("thinking") else self._open(block)
                self._blocks[-1]["thinking"] += text
                return [*begin, self._delta({"type": "thinking_delta", "thinking": text})]

    def _in(self, kind: str) -> bool:
        return self._is_open and bool(self._blocks[-1]["type"] == kind)

    def _open(self, block: Fields) -> list[Fields]:
        ends = self._close()
        self._blocks.append(block)
        self._is_open = True
        shown = {**block, "input": {}} if block["type"] == "tool_use" else dict(block)
        start = {"type": "content_block_start", "index": len(self._blocks) - 1}
        return [*ends, {**start, "content_block": shown}]

    def _delta(self, delta: Fields) -> Fields:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}

    def _close(self) -> list[Fields]:
        if not self._is_open:
            return []
        self._is_open = False
        return [{"type": "content_block_stop", "index": len(self._blocks) - 1}]


def _shown(block: Fields) -> Fields:
    """Return a block in its final form. A call becomes text if its input is not a complete JSON
    object."""
    if block["type"] != "tool_use":
        return block
    try:
        return {**block, "input": json.loads(block["input"])}
    except (ValueError, RecursionError):
        return {"type": "text", "text": f"{block['name']} {block['input']}"}
