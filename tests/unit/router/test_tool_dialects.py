"""Calls in other forms than JSON objects, through the HTTP listener."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.router.front_fakes import check_schema, sse_payloads
from tests.support.router.http_app import check_error, post
from tests.support.router.tool_answers import CHAT, HELLO, PARAMETERS, TOOLS, front_saying

TAGGED = (
    "Let me see.\n<tool_call>\n<function=weather>\n<parameter=city>\nKöln\n</parameter>\n"
    "</function>\n</tool_call>\n<tool_call>\n<function=clock>\n</function>\n</tool_call>"
)
PYTHON = 'Let me see.\n```tool_code\n[weather(city="Köln"), clock()]\n```'


@pytest.mark.parametrize(("parser", "text"), [("qwen3_coder", TAGGED), ("gemma", PYTHON)])
async def test_calls_streamed_and_whole(parser: str, text: str) -> None:
    front = front_saying(text, tool_parser=parser)
    body = (await post(front, CHAT, {**HELLO, **TOOLS})).json()
    check_schema(body, "CreateChatCompletionResponse")
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "Let me see."
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert [one["name"] for one in functions] == ["weather", "clock"]
    assert [json.loads(one["arguments"]) for one in functions] == [{"city": "Köln"}, {}]
    streamed = await post(front, CHAT, {**HELLO, **TOOLS, "stream": True})
    arguments = ["", ""]
    for payload in sse_payloads(streamed.text)[:-1]:
        chunk = json.loads(payload)
        check_schema(chunk, "CreateChatCompletionStreamResponse")
        for call in chunk["choices"][0]["delta"].get("tool_calls", ()):
            arguments[call["index"]] += call["function"]["arguments"]
    assert arguments == [one["arguments"] for one in functions]


async def test_a_schema_that_the_form_cannot_keep_is_refused() -> None:
    front = front_saying("", tool_parser="glm45")
    schema = {**PARAMETERS, "minProperties": 1}
    function: dict[str, Any] = {"name": "weather", "parameters": schema, "strict": True}
    tools = [{"type": "function", "function": function}]
    response = await post(front, CHAT, {**HELLO, "tools": tools, "tool_choice": "required"})
    error = check_error(response, 400, "tools")
    assert "not support minProperties" in error["message"]


@pytest.mark.parametrize(
    ("template", "begins_in"),
    [
        ("{{ messages[0].content }}<think>\n", "reasoning"),
        ("{{ messages[0].content }}<think>\n\n</think>\n\n", "content"),
        ("{{ messages[0].content }}:{# </think> #}", "start"),
    ],
)
async def test_a_template_may_open_the_reasoning(template: str, begins_in: str) -> None:
    front = front_saying("Hi", template=template)
    assert (await post(front, CHAT, HELLO)).status_code == 200
    (request,) = front.dispatcher.requests
    assert request.begins_in == begins_in
