"""The output items of a response while it is generated, and their events.

A message: output_item.added, content_part.added, output_text.delta …, output_text.done,
content_part.done, output_item.done. A function call: output_item.added,
function_call_arguments.delta …, function_call_arguments.done, output_item.done. A call of a custom
tool: as a function call, with custom_tool_call_input in place of function_call_arguments, and one
delta with the whole input. Reasoning: as a message, with reasoning_text in place of output_text.
"""

from __future__ import annotations

import secrets
from typing import Any

from router.core.request import AnswerPart
from router.dialects.dialect import Dialect
from router.dialects.output import ParsedOutput
from router.dialects.pieces import Arguments, CallEnd, CallStart, Content, Piece, Reasoning
from router.dialects.tools import ToolUse, custom_input, custom_names

Fields = dict[str, Any]


class ResponseOutput:
    """The output items of one answer while it is generated. ``items`` holds the items in their
    final form."""

    def __init__(self, dialect: Dialect, use: ToolUse | None, begins_in: AnswerPart) -> None:
        """Create the state before the first text. ``begins_in`` is the part of the answer in which
        the prompt ends."""
        self._output = ParsedOutput(dialect, use, begins_in)
        self._custom = custom_names(use)
        self._calls = 0
        self._is_open = False
        self.items: list[Fields] = []

    def feed(self, text: str, *, last: bool, cut: bool = False) -> list[Fields]:
        """Add the next part of the answer's text, and return its events, without their sequence
        numbers.

        ``last``: no more text follows. ``cut``: the answer ended at its maximum length.
        """
        events: list[Fields] = []
        for piece in self._output.feed(text, last=last):
            events += self._events_of(piece)
        if last:
            if not self.items:
                events += self._open_message()
            events += self._close("incomplete" if cut else "completed")
        return events

    def _events_of(self, piece: Piece) -> list[Fields]:
        match piece:
            case Content(text):
                begin = [] if self._in("message") else [*self._close(), *self._open_message()]
                self.items[-1]["content"][0]["text"] += text
                about = {**self._part_place(), "delta": text, "logprobs": []}
                return [*begin, {"type": "response.output_text.delta", **about}]
            case Reasoning(text):
                begin = [] if self._in("reasoning") else [*self._close(), *self._open_reasoning()]
                self.items[-1]["content"][0]["text"] += text
                about = {**self._part_place(), "delta": text}
                return [*begin, {"type": "response.reasoning_text.delta", **about}]
            case CallStart(name):
                return [*self._close(), *self._open_call(name)]
            case Arguments(text):
                self.items[-1]["arguments"] += text
                if self._in("custom_tool_call"):
                    return []
                about = {**self._place(), "delta": text}
                return [{"type": "response.function_call_arguments.delta", **about}]
            case CallEnd():
                return self._close()

    def _in(self, kind: str) -> bool:
        return self._is_open and bool(self.items[-1]["type"] == kind)

    def _place(self) -> Fields:
        return {"item_id": self.items[-1]["id"], "output_index": len(self.items) - 1}

    def _part_place(self) -> Fields:
        return {**self._place(), "content_index": 0}

    def _open(self, item: Fields, shown: Fields) -> Fields:
        self.items.append(item)
        self._is_open = True
        index = len(self.items) - 1
        return {"type": "response.output_item.added", "output_index": index, "item": shown}

    def _open_message(self) -> list[Fields]:
        item: Fields = {
            "id": f"msg_{secrets.token_hex(16)}",
            "type": "message",
            "status": "in_progress",
            "role": "assistant",
            "content": [_text_part("")],
        }
        return self._open_text(item)

    def _open_reasoning(self) -> list[Fields]:
        item: Fields = {
            "id": f"rs_{secrets.token_hex(16)}",
            "type": "reasoning",
            "status": "in_progress",
            "summary": [],
            "content": [{"type": "reasoning_text", "text": ""}],
        }
        return self._open_text(item)

    def _open_text(self, item: Fields) -> list[Fields]:
        added = self._open(item, {**item, "content": []})
        part = {**self._part_place(), "part": dict(item["content"][0])}
        return [added, {"type": "response.content_part.added", **part}]

    def _open_call(self, name: str) -> list[Fields]:
        call = self._output.calls[self._calls]
        self._calls += 1
        item: Fields = {
            "id": f"fc_{secrets.token_hex(16)}",
            "type": "function_call",
            "status": "in_progress",
            "call_id": call.id,
            "name": name,
            "arguments": "",
        }
        if name in self._custom:
            item["type"] = "custom_tool_call"
            shown = {key: value for key, value in item.items() if key != "arguments"}
            return [self._open(item, {**shown, "input": ""})]
        return [self._open(item, dict(item))]

    def _close(self, status: str = "completed") -> list[Fields]:
        """Close the item that is still open. Return its final events; none if no item is open."""
        if not self._is_open:
            return []
        self._is_open = False
        item = self.items[-1]
        item["status"] = status
        if item["type"] in ("message", "reasoning"):
            (part,) = item["content"]
            told = {**self._part_place(), "text": part["text"]}
            if part["type"] == "output_text":
                told["logprobs"] = []
            ends = [
                {"type": f"response.{part['type']}.done", **told},
                {"type": "response.content_part.done", **self._part_place(), "part": dict(part)},
            ]
        elif item["type"] == "custom_tool_call":
            item["input"] = custom_input(item.pop("arguments"))
            kind = "response.custom_tool_call_input"
            ends = [
                {"type": f"{kind}.delta", **self._place(), "delta": item["input"]},
                {"type": f"{kind}.done", **self._place(), "input": item["input"]},
            ]
        else:
            told = {**self._place(), "name": item["name"], "arguments": item["arguments"]}
            ends = [{"type": "response.function_call_arguments.done", **told}]
        index = len(self.items) - 1
        done = {"type": "response.output_item.done", "output_index": index, "item": dict(item)}
        return [*ends, done]


def _text_part(text: str) -> Fields:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
