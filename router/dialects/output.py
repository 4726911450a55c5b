"""An answer while it is generated: its reasoning, its content, and its calls with their ids."""

from __future__ import annotations

from dataclasses import dataclass

from router.core.request import AnswerPart
from router.dialects.dialect import Dialect
from router.dialects.pieces import (
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    Reasoning,
    joined,
)
from router.dialects.tools import ToolUse


@dataclass(slots=True)
class OutputCall:
    """A tool call of an answer that has begun; its ``arguments`` grow while they are generated."""

    id: str
    name: str
    arguments: str = ""


class ParsedOutput:
    """Parses one choice of an answer while it is generated. ``reasoning``, ``content`` and
    ``calls`` hold what was found so far."""

    def __init__(
        self, dialect: Dialect, use: ToolUse | None, begins_in: AnswerPart = "start"
    ) -> None:
        """Create a parser; ``use`` names the tools that may be called.

        ``begins_in``: the part of the answer in which the prompt ends.
        """
        self._new_id = dialect.tools.new_id
        self._single = use is not None and use.single
        self._parser = dialect.parser(use, begins_in)
        self._dropping = False
        self.reasoning = ""
        self.content = ""
        self.calls: list[OutputCall] = []

    def feed(self, text: str, *, last: bool) -> list[Piece]:
        """Parse the next part of the text, and return the pieces in it. ``last`` is true if no more
        text follows.

        If the request allows only one tool call, later ones are dropped.
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
            case Reasoning(text):
                self.reasoning += text
                return True
            case CallStart(name, written_id):
                self._dropping = self._single and bool(self.calls)
                if not self._dropping:
                    self.calls.append(OutputCall(written_id or self._new_id(), name))
            case Arguments(text) if not self._dropping:
                self.calls[-1].arguments += text
            case Arguments() | CallEnd():
                pass
        return not self._dropping
