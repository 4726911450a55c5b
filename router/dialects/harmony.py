"""The dialect of gpt-oss: messages with channels, some to a recipient.

    <|channel|>analysis<|message|>I must look.<|end|><|start|>assistant
    <|channel|>commentary to=functions.look_up <|constrain|>json<|message|>{"word": "x"}<|call|>
    <|channel|>final<|message|>It is here.<|return|>

Messages of the channel ``analysis`` are reasoning, those to ``functions`` are calls, and all others
are content. Tokens that end an answer have no text, so the last message may have no end marker. The
library ``openai-harmony`` is not used: it parses token ids, and starts only with its own vocabulary
file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.core.request import AnswerPart
from router.dialects.calls import NAME
from router.dialects.formats import ToolFormat
from router.dialects.json_calls import arguments_rule, dump
from router.dialects.json_scanner import WHITE
from router.dialects.pieces import (
    AnswerParser,
    Arguments,
    CallEnd,
    CallStart,
    Content,
    Reasoning,
    SteppedParser,
    first_marker,
    possible_start,
)
from router.dialects.rules import literal
from router.dialects.tools import Tool

START, CHANNEL, MESSAGE, CONSTRAIN = "<|start|>", "<|channel|>", "<|message|>", "<|constrain|>"
ENDS = ("<|end|>", "<|call|>", "<|return|>")
_MAX_HEADER_CHARACTERS = 256
_HEADER = re.compile(
    r"\s*(?:<\|start\|>assistant)?(?P<first>\s+to=[^\s<]+)?\s*"
    # Sometimes the model writes a header to itself before that of its message.
    r"(?:<\|channel\|>(?:analysis|commentary)\s+to=assistant\s*)?"
    r"<\|channel\|>(?P<channel>analysis|commentary|final)(?P<second>\s+to=[^\s<]+)?"
    r"(?:\s*(?:<\|constrain\|>)?\s*(?:json|code))?\s*<\|message\|>"
)
_BEGINNINGS = (START, CHANNEL, "to=")
_FUNCTION = re.compile(rf"to=functions\.{NAME}")
_BETWEEN = "\n\n"
"""Text that joins two messages of one type in an answer, such as two messages of content."""


@dataclass(frozen=True, slots=True)
class HarmonyCalls:
    """The form of gpt-oss's tool calls, which are messages to a function. The token after a call
    ends the answer."""

    texts: tuple[str, ...] = (START, CHANNEL, MESSAGE, CONSTRAIN, *ENDS)

    def write(self, name: str, arguments: Any) -> str:
        """Return the text of a tool call, as the model writes it. See ``CallWriter``."""
        return f"{_opened(name)}{dump(arguments)}{ENDS[1]}"

    def rules(self, rule: str, tool: Tool, special: Mapping[str, int]) -> list[str]:
        """Return rules of a grammar for calls of ``tool``. The first one, named ``rule``, matches
        what ``write`` returns. See ``CallWriter``."""
        start, opened = literal(f"{START}assistant", special), literal(_opened(tool.name), special)
        return [f"{rule}: ({start})? {opened} {rule}_arguments", *arguments_rule(rule, tool)]


def _opened(name: str) -> str:
    return f"{CHANNEL}commentary to=functions.{name} {CONSTRAIN}json{MESSAGE}"


class HarmonyParser(SteppedParser):
    """An ``AnswerParser`` for one answer of gpt-oss, which consists of messages."""

    def __init__(
        self, tools: Mapping[str, Tool], begins_in: AnswerPart, *, shows_reasoning: bool
    ) -> None:
        """Create a parser; ``tools``: those that may be called, by name.

        ``begins_in``: the part of the answer in which the prompt ends. ``shows_reasoning``: whether
        reasoning is part of the content.
        """
        super().__init__()
        self._tools = tools
        self._reasoning = Content if shows_reasoning else Reasoning
        self._header = ""
        """Header of a tool call whose body has not begun. It becomes content if there is no
        call."""
        self._kind: type[Content | Reasoning | Arguments] | None = None
        """Type of the current message's text; None: the header of the message has not ended."""
        if begins_in != "start":
            self._kind = Content if begins_in == "content" else self._reasoning
        self._name = ""
        """Name of the tool in the header of a tool call whose body has not begun."""
        self._given: set[type[Content | Reasoning | Arguments]] = set()
        """Types of the pieces that earlier messages of the answer gave."""
        self._is_new = False
        """Whether the current message has no text yet."""

    def _step(self) -> bool:
        return self._read_header() if self._kind is None else self._read_body()

    def _end(self, rest: str) -> None:
        if self._name and not rest.strip(WHITE):
            # The token that ends a call has no text.
            self._call_without_arguments()
        elif self._name:
            self._kind, rest = Content, self._header + rest
        if self._kind is not None:
            self._give(self._kind, rest)
        elif rest.strip(WHITE) or not self._given:
            self._give(Content, rest)

    def _read_header(self) -> bool:
        found = _HEADER.match(self._text[:_MAX_HEADER_CHARACTERS])
        if found is not None:
            self._header, self._text = found[0], self._text[found.end() :]
            self._open(found)
            return True
        bare = self._text.lstrip(WHITE)
        may_begin = any(bare.startswith(one) or one.startswith(bare) for one in _BEGINNINGS)
        _, beyond = first_marker(bare[1:], (*ENDS, START, MESSAGE))
        if may_begin and not beyond and len(self._text) < _MAX_HEADER_CHARACTERS:
            return False
        self._kind, self._is_new = Content, True
        if bare.startswith(START):
            # The marker begins no message. The body's reader must not see it again.
            shown = len(self._text) - len(bare) + len(START)
            self._give(Content, self._text[:shown])
            self._text = self._text[shown:]
        return True

    def _open(self, header: re.Match[str]) -> None:
        self._is_new = True
        recipient = (header["first"] or header["second"] or "").strip()
        call = _FUNCTION.fullmatch(recipient)
        if call is not None and call["name"] in self._tools:
            self._kind, self._name = Arguments, call["name"]
        elif recipient:
            # The message is for a tool that was not offered.
            self._kind = Content
            self._give(Content, self._header)
        else:
            self._kind = self._reasoning if header["channel"] == "analysis" else Content

    def _read_body(self) -> bool:
        if self._name and not self._begin_call():
            return False
        assert self._kind is not None
        markers = (*ENDS, START)
        place, marker = first_marker(self._text, markers)
        if not marker:
            cut = len(self._text) - possible_start(self._text, markers)
            self._give(self._kind, self._text[:cut])
            self._text = self._text[cut:]
            return False
        self._give(self._kind, self._text[:place])
        self._text = self._text[place + (len(marker) if marker in ENDS else 0) :]
        if self._kind is Arguments:
            self._pieces.append(CallEnd())
        self._given.add(self._kind)
        self._kind = None
        return True

    def _begin_call(self) -> bool:
        """Begin a tool call if the body of its message starts like a JSON object, or is empty."""
        body = self._text.lstrip(WHITE)
        ends = (*ENDS, START)
        if any(one.startswith(body) and one != body for one in ends):
            return False
        if body.startswith("{"):
            self._pieces.append(CallStart(self._name))
        elif body.startswith(ends):
            self._text = body
            self._call_without_arguments()
        else:
            self._kind = Content
            self._give(Content, self._header)
        self._name = ""
        return True

    def _call_without_arguments(self) -> None:
        self._pieces += [CallStart(self._name), Arguments("{}")]

    def _give(self, kind: type[Content | Reasoning | Arguments], text: str) -> None:
        if not text:
            return
        if self._is_new and kind in self._given and kind is not Arguments:
            self._pieces.append(kind(_BETWEEN))
        self._is_new = False
        self._pieces.append(kind(text))


@dataclass(frozen=True, slots=True, kw_only=True)
class HarmonyFormat(ToolFormat):
    """The format of gpt-oss's tool calls, which are messages of an answer."""

    def parser(self, tools: Mapping[str, Tool]) -> AnswerParser:
        """Create a parser for one answer, which may call ``tools``, by name. See ``ToolFormat``."""
        return HarmonyParser(tools, "start", shows_reasoning=False)


FORMAT = HarmonyFormat(
    name="harmony",
    form=HarmonyCalls(),
    before="",
    between=None,
    behind="",
    how_to_call=(
        "To call one, write a message of the channel commentary to it:\n"
        f"{HarmonyCalls().write('<name>', {})}\nWhen no function helps, answer in plain words."
    ),
)
