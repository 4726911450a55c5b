"""What it takes to speak with a model about tools: one object a family."""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from router.tool_calls.call_reader import CallShape
from router.tool_calls.marked_parser import MarkedParser, Markers
from router.tool_calls.named_call_reader import ARGUMENTS, CALL_ID
from router.tool_calls.pieces import ToolParser
from router.tool_calls.tool import Tool


def openai_id() -> str:
    """An id like OpenAI's."""
    letters = string.ascii_letters + string.digits
    return "call_" + "".join(secrets.choice(letters) for _ in range(24))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models is told of tools, writes calls, and reads their results."""

    name: str
    markers: Markers
    before: str
    """Stands before the first call; ``between`` between two, ``behind`` behind the last."""
    between: str
    behind: str
    arguments_key: str
    how_to_call: str
    """The part of the instructions that shows what a call looks like."""
    shape: CallShape = field(default_factory=CallShape)
    named: bool = False
    """Calls are written as a name and the object of its arguments."""
    new_id: Callable[[], str] = openai_id

    def parser(self, names: Collection[str]) -> ToolParser:
        """For one answer that may call tools of these names."""
        return MarkedParser(self.markers, self.shape, names)

    @property
    def texts(self) -> tuple[str, ...]:
        """Markers: where they are special tokens, the parser must see them nevertheless."""
        found = (self.markers.opening, self.markers.closing)
        named = (CALL_ID, ARGUMENTS) if self.markers.named else ()
        return tuple(text for text in (*found, *named) if text)

    def instructions(self, tools: Iterable[Tool]) -> str:
        """For the system message of a model whose chat template ignores tools."""
        listed = "\n".join(_dump(tool.as_template_value()) for tool in tools)
        return (
            "You can call functions. Their signatures, one in a line, are within <tools></tools>:\n"
            f"<tools>\n{listed}\n</tools>\n{self.how_to_call}"
        )

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls, by name and arguments, as the model writes them."""
        texts = (self.opened(name) + _dump(given) + self.closed for name, given in calls)
        return self.before + self.between.join(texts) + self.behind

    def opened(self, name: str) -> str:
        """What of a call stands before its arguments."""
        if self.named:
            return name + ARGUMENTS
        return f'{{"name": {_dump(name)}, "{self.arguments_key}": '

    @property
    def closed(self) -> str:
        """What of a call stands behind its arguments."""
        return "" if self.named else "}"

    def result(self, text: str) -> str:
        """A tool's result for a model whose chat template knows no role for it."""
        return f"<tool_response>\n{text}\n</tool_response>"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
