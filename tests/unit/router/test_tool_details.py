"""Tool calls with what else an answer may have: several choices, log probabilities, usage."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.router.front_fakes import check_schema, sse_payloads
from tests.support.router.http_app import post
from tests.support.router.tool_answers import CHAT, HELLO, TOOLS, TWO_CALLS, front_saying

ASKED: dict[str, Any] = {**HELLO, **TOOLS, "n": 2, "logprobs": True, "return_token_ids": True}


async def test_a_whole_answer() -> None:
    front = front_saying(TWO_CALLS)
    body = (await post(front, CHAT, ASKED)).json()
    check_schema(body, "CreateChatCompletionResponse")
    assert len(body["choices"]) == 2
    for choice in body["choices"]:
        assert len(choice["message"]["tool_calls"]) == 2
        text = b"".join(bytes(one["bytes"]) for one in choice["logprobs"]["content"])
        assert text.decode().startswith(TWO_CALLS)
        assert choice["token_ids"]
    ids = {call["id"] for choice in body["choices"] for call in choice["message"]["tool_calls"]}
    assert len(ids) == 4


@pytest.mark.parametrize("usage", [False, True])
async def test_a_stream(usage: bool) -> None:
    front = front_saying(TWO_CALLS)
    options = {"include_usage": True, "continuous_usage_stats": True}
    asked = {**ASKED, "stream": True, **({"stream_options": options} if usage else {})}
    payloads = sse_payloads((await post(front, CHAT, asked)).text)
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    for chunk in chunks:
        check_schema(chunk, "CreateChatCompletionStreamResponse")
        assert ("usage" in chunk) == usage
    if usage:
        assert chunks[0]["usage"]["completion_tokens"] == 0
    for index in (0, 1):
        own = [
            c["choices"][0] for c in chunks if c["choices"] and c["choices"][0]["index"] == index
        ]
        scored = [one for c in own if c["logprobs"] for one in c["logprobs"]["content"]]
        text = b"".join(bytes(one["bytes"]) for one in scored)
        assert text.decode().startswith(TWO_CALLS)
        parts = [part for c in own for part in c["delta"].get("tool_calls", ())]
        assert {part["index"] for part in parts} == {0, 1}
        assert own[-1]["finish_reason"] == "tool_calls"
