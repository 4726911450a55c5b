"""A streamed answer that may call tools: its content, and its calls with their ids."""

from __future__ import annotations

from dataclasses import dataclass

from router.tool_calls.formats import ToolFormat
from router.tool_calls.pieces import Arguments, CallBegun, Content, Piece, joined
from router.tool_calls.tools import ToolUse


@dataclass(slots=True)
class OutputCall:
    """A call that has begun; ``arguments`` grow."""

    id: str
    name: str
    arguments: str = ""


class ToolOutput:
    """Parses one choice. ``calls`` and ``content`` hold what it has so far."""

    def __init__(self, form: ToolFormat, use: ToolUse) -> None:
        self._form = form
        self._single = use.single
        self._parser = form.parser(use.names)
        self._dropping = False
        self.content = ""
        self.calls: list[OutputCall] = []

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        """Parse the next part of the text. Returns its pieces; ``last``: no more text comes.

        If the request allows one call, later ones are dropped.
        """
        pieces = self._parser.feed(text)
        if last:
            pieces += self._parser.finish()
        return [piece for piece in joined(pieces) if self._keep(piece)]

    def _keep(self, piece: Piece) -> bool:
        match piece:
            case Content(text):
                self.content += text
                return True
            case CallBegun(name):
                self._dropping = self._single and bool(self.calls)
                if not self._dropping:
                    self.calls.append(OutputCall(self._form.new_id(), name))
            case Arguments(text) if not self._dropping:
                self.calls[-1].arguments += text
        return not self._dropping
