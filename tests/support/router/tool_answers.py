"""Shared by the tests of tool answers and by other tests."""

from __future__ import annotations

from typing import Any

from tests.support.router.front_fakes import (
    Front,
    make_front,
)

CHAT = "/v1/chat/completions"


HELLO: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "Weather?"}]}


PARAMETERS = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}


WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "weather", "description": "Tells it.", "parameters": PARAMETERS},
}


CLOCK = {"type": "function", "function": {"name": "clock"}}


TOOLS = {"tools": [WEATHER, CLOCK]}


TWO_CALLS = (
    "Let me see.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)


def front_saying(text: str, **options: Any) -> Front:
    front = make_front(context=4096, **options)
    front.dispatcher.text = text
    return front
