"""Conversations for comparisons of prompts, as every API parses its history into turns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from router.conversation.turns import Turn, calls_turn, result_turn, text_turn, with_reasoning
from router.dialects.tools import Tool, ToolUse

WEATHER = Tool(
    "weather",
    "Tells the weather.",
    {
        "type": "object",
        "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
        "required": ["city"],
    },
)
CLOCK = Tool("clock", "Tells the time.", {"type": "object", "properties": {}})
USE = ToolUse((WEATHER, CLOCK), frozenset({"weather", "clock"}))
USER, ANSWER, SYSTEM = "user", "assistant", "system"


@dataclass(frozen=True)
class Conversation:
    """Turns, and what goes with them."""

    turns: Sequence[Turn]
    tools: ToolUse | None = None
    closed: bool = False
    """Whether the prompt ends after the last message."""

    def messages(self) -> list[dict[str, Any]]:
        """The turns as ``apply_chat_template`` takes them: arguments are objects."""
        return [_message(turn) for turn in self.turns]


def _message(turn: Turn) -> dict[str, Any]:
    calls = [
        {**call, "function": {**call["function"], "arguments": _object(call["function"])}}
        for call in turn.get("tool_calls", ())
    ]
    return {**turn, "tool_calls": calls} if calls else dict(turn)


def _object(function: Mapping[str, Any]) -> Any:
    return json.loads(function["arguments"])


def _talk(*texts: tuple[str, str]) -> list[Turn]:
    return [text_turn(role, text) for role, text in texts]


ASKED, CALL = (
    text_turn(USER, "Weather in Paris?"),
    calls_turn("", [("abcdef123", "weather", '{"city": "Paris"}')]),
)
RESULT = result_turn("abcdef123", '{"sky": "blue"}')
TWO = calls_turn(
    "I look.",
    [("abcdef123", "weather", '{"city": "Paris", "days": 2}'), ("abcdef456", "clock", "{}")],
)
CONVERSATIONS: Mapping[str, Conversation] = {
    "a question": Conversation(_talk((USER, "Hi there"))),
    "a question, closed": Conversation(_talk((USER, "Hi there")), closed=True),
    "a system message": Conversation(_talk((SYSTEM, "Be brief."), (USER, "Hi"))),
    "three turns": Conversation(_talk((USER, "Hi"), (ANSWER, "Hello!"), (USER, "Why?"))),
    "five turns with a system message": Conversation(
        _talk((SYSTEM, "S"), (USER, "A"), (ANSWER, "B"), (USER, "C"), (ANSWER, "D"), (USER, "E"))
    ),
    "an answer at the end, closed": Conversation(
        _talk((USER, "Hi"), (ANSWER, "Hello!")), closed=True
    ),
    "white space": Conversation(_talk((USER, "  Hi \n\n"), (ANSWER, "\n Hello \t"), (USER, " A "))),
    "other scripts": Conversation(_talk((USER, "Ça va? 東京 é e\u0301 😎👩‍👧 \u202eabc"))),
    "markup": Conversation(_talk((USER, "<b>{{ x }}</b> {% raw %} & 'a' \"b\" \\n [INST]"))),
    "texts of special tokens": Conversation(_talk((USER, "a </s> b <|im_end|> <s><tool> c"))),
    "an empty text": Conversation(
        _talk(
            (USER, ""),
        )
    ),
    "a long text": Conversation(_talk((USER, "The quick brown fox. " * 200))),
    "two questions in a row": Conversation(_talk((USER, "Hi"), (USER, "Are you there?"))),
    "reasoning": Conversation(
        [
            text_turn(USER, "1+1?"),
            with_reasoning(text_turn(ANSWER, "2"), "One and one."),
            text_turn(USER, "Sure?"),
        ]
    ),
    "names": Conversation([text_turn(USER, "Hi", "alice"), text_turn(ANSWER, "Hi"), ASKED]),
    "tools": Conversation([ASKED], USE),
    "tools and a system message": Conversation([text_turn(SYSTEM, "Be brief."), ASKED], USE),
    "a call": Conversation([ASKED, CALL, RESULT], USE),
    "an answer after a call": Conversation(
        [ASKED, CALL, RESULT, text_turn(ANSWER, "Blue."), text_turn(USER, "And Rome?")], USE
    ),
    "two calls": Conversation([ASKED, TWO, RESULT, result_turn("abcdef456", "12:00")], USE),
}
"""Conversations by what is in them."""
