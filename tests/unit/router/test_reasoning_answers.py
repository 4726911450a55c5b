"""Reasoning through the front's APIs: what is asked, what the model sees, what the client gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest

from baton.client import AsyncClient, Message
from baton.reasoning import ReasoningSpan
from baton.v1 import inference_pb2
from tests.support.router import grpc_inference
from tests.support.router.front_fakes import Front, check_schema, make_front, serve, sse_payloads
from tests.support.router.http_app import check_error, post
from tests.support.router.reasoning import (
    MARKERS,
    OPENED,
    REASONED,
    SWITCHED,
    WITH_EFFORT,
    reasoning_front,
)
from tests.support.router.tool_answers import CHAT, CLOCK, HELLO

SCHEMA = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "object"}}}
CALL = '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
CUT = "<think>\nLet me think"
Chunk = dict[str, Any]


async def whole(front: Front, body: dict[str, Any], path: str = CHAT) -> dict[str, Any]:
    response = await post(front, path, body)
    assert response.status_code == 200, response.text
    found: dict[str, Any] = response.json()
    return found


async def stream(front: Front, body: dict[str, Any]) -> list[Chunk]:
    response = await post(front, CHAT, {**body, "stream": True})
    payloads = sse_payloads(response.text)
    assert payloads[-1] == "[DONE]"
    return [json.loads(payload) for payload in payloads[:-1]]


def joined(chunks: list[Chunk], name: str) -> str:
    return "".join(
        choice["delta"].get(name) or "" for chunk in chunks for choice in chunk["choices"]
    )


def ids_of(front: Front, marker: str) -> tuple[int, ...]:
    return front.tokenizer.encode(marker, add_special_tokens=False)


def prompt_of(front: Front) -> str:
    request = front.dispatcher.requests[-1]
    return front.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)


async def test_reasoning_is_apart_from_the_content() -> None:
    front = reasoning_front()
    body = await whole(front, HELLO)
    check_schema(body, "CreateChatCompletionResponse")
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": "Paris.",
        "refusal": None,
        "reasoning_content": "Let me think.",
        "reasoning": "Let me think.",
    }
    assert choice["finish_reason"] == "stop"


async def test_a_stream_says_what_a_whole_answer_says() -> None:
    front = reasoning_front()
    chunks = await stream(front, {**HELLO, "stream_options": {"include_usage": True}})
    assert joined(chunks, "reasoning_content") == "Let me think."
    assert joined(chunks, "reasoning") == "Let me think."
    assert joined(chunks, "content") == "Paris."
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    assert sum("reasoning_content" in delta for delta in deltas) > 2
    assert not any({"content", "reasoning_content"} <= set(delta) for delta in deltas)
    usage = (await whole(front, HELLO))["usage"]
    assert chunks[-1]["usage"]["completion_tokens_details"] == usage["completion_tokens_details"]


@pytest.mark.parametrize("template", [SWITCHED, OPENED])
async def test_reasoning_tokens_are_those_between_the_markers(template: str) -> None:
    """Of all choices; a marker is none of them."""
    text = REASONED if template == SWITCHED else REASONED.removeprefix("<think>")
    front = reasoning_front(template, text)
    usage = (await whole(front, {**HELLO, "n": 3}))["usage"]
    ids = ids_of(front, text)
    begin = 1 if template == SWITCHED else 0
    between = ids.index(*ids_of(front, "</think>")) - begin
    assert usage["completion_tokens_details"] == {"reasoning_tokens": 3 * between}
    assert usage["completion_tokens"] == 3 * (len(ids) + 1)


async def test_an_answer_that_is_cut_in_its_reasoning_has_no_content() -> None:
    front = reasoning_front(text=CUT)
    most = len(ids_of(front, CUT))
    body = await whole(front, {**HELLO, "max_tokens": most})
    (choice,) = body["choices"]
    assert choice["message"]["content"] == ""
    assert choice["message"]["reasoning_content"] == "Let me think"
    assert choice["finish_reason"] == "length"
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": most - 1}


async def test_reasoning_may_be_left_out() -> None:
    front = reasoning_front()
    body = await whole(front, {**HELLO, "include_reasoning": False})
    (choice,) = body["choices"]
    assert choice["message"] == {"role": "assistant", "content": "Paris.", "refusal": None}
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    chunks = await stream(front, {**HELLO, "include_reasoning": False})
    assert joined(chunks, "reasoning_content") == ""
    assert joined(chunks, "content") == "Paris."


async def test_calls_behind_reasoning() -> None:
    front = reasoning_front(text=f"<think>Hm.</think>{CALL}")
    asked = {**HELLO, "tools": [CLOCK]}
    (choice,) = (await whole(front, asked))["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] is None
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"]["name"] == "clock"
    chunks = await stream(front, asked)
    assert joined(chunks, "reasoning") == "Hm."
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"


async def test_what_turns_reasoning_off_reaches_the_template() -> None:
    front = reasoning_front(text="Paris.")
    for asked in (
        {"enable_thinking": False},
        {"reasoning_effort": "none"},
        {"thinking": {"type": "disabled"}},
        {"chat_template_kwargs": {"enable_thinking": False}},
    ):
        body = await whole(front, {**HELLO, **asked})
        assert prompt_of(front).endswith("assistant\n<think>\n\n</think>\n\n"), asked
        assert body["choices"][0]["message"]["content"] == "Paris."
        assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
        assert front.dispatcher.requests[-1].reasoning_span is None
    for asked in ({"enable_thinking": True}, {"thinking": {"type": "adaptive"}}):
        await whole(front, {**HELLO, **asked})
        assert prompt_of(front).endswith("assistant\n"), asked


@pytest.mark.parametrize(
    ("asked", "budget"),
    [
        ({}, None),
        ({"thinking_token_budget": 7}, 7),
        ({"thinking_token_budget": 0}, 0),
        ({"thinking_token_budget": -1}, None),
        ({"thinking_token_budget": 1 << 30, "max_tokens": 50}, 50),
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, 9),
        ({"reasoning_effort": "minimal", "max_tokens": 400}, 256),
        ({"reasoning_effort": "low", "max_tokens": 40}, 40),
        ({"reasoning_effort": "high"}, None),
        ({"reasoning_effort": "high", "thinking_token_budget": 5}, 5),
    ],
)
async def test_a_budget_is_the_engines_to_keep(asked: dict[str, Any], budget: int | None) -> None:
    front = reasoning_front()
    await whole(front, {**HELLO, **asked})
    start, end = (ids_of(front, marker) for marker in MARKERS)
    expected = ReasoningSpan((end,), start, budget, end) if budget is not None else None
    assert front.dispatcher.requests[-1].reasoning_span == expected


async def test_where_the_template_has_no_switch_none_is_a_budget() -> None:
    front = reasoning_front(OPENED, "</think>Paris.")
    await whole(front, {**HELLO, "reasoning_effort": "none"})
    end = ids_of(front, "</think>")
    assert front.dispatcher.requests[-1].reasoning_span == ReasoningSpan((end,), (), 0, end)


async def test_an_effort_goes_to_a_template_that_takes_it() -> None:
    front = reasoning_front(WITH_EFFORT)
    for effort, shown in (("low", "low"), ("high", "high"), ("minimal", "low")):
        await whole(front, {**HELLO, "reasoning_effort": effort})
        assert prompt_of(front).startswith(f"Reasoning: {shown}\n")
        assert front.dispatcher.requests[-1].reasoning_span is None


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"reasoning_effort": "extreme"}, "reasoning_effort"),
        ({"reasoning_effort": "none", "enable_thinking": True}, "reasoning_effort"),
        ({"reasoning_effort": "low", "enable_thinking": False}, "reasoning_effort"),
        ({"thinking_token_budget": -2}, "thinking_token_budget"),
        ({"thinking_token_budget": 1 << 31}, "thinking_token_budget"),
        ({"thinking": {"type": "on"}}, "thinking.type"),
        ({"thinking": "on"}, "thinking"),
        ({"thinking": {"type": "enabled", "budget_tokens": "x"}}, "thinking.budget_tokens"),
        ({"thinking": {"type": "enabled"}, "enable_thinking": True}, "enable_thinking"),
        (
            {"enable_thinking": True, "chat_template_kwargs": {"enable_thinking": False}},
            "chat_template_kwargs.enable_thinking",
        ),
        (
            {"thinking_token_budget": 5, "allowed_token_ids": [5]},
            "thinking_token_budget",
        ),
        ({"continue_final_message": True, "add_generation_prompt": True}, "continue_final_message"),
    ],
)
async def test_what_cannot_be(asked: dict[str, Any], param: str) -> None:
    check_error(await post(reasoning_front(), CHAT, {**HELLO, **asked}), 400, param)


async def test_a_grammar_is_for_what_comes_behind_the_reasoning() -> None:
    front = reasoning_front()
    await whole(front, {**HELLO, "response_format": SCHEMA})
    start, end = (ids_of(front, marker) for marker in MARKERS)
    assert front.dispatcher.requests[-1].reasoning_span == ReasoningSpan((end,), start, None, end)
    await whole(front, {**HELLO, "response_format": SCHEMA, "enable_thinking": False})
    assert front.dispatcher.requests[-1].reasoning_span is None
    opened = reasoning_front(OPENED, "Hm.</think>Paris.")
    await whole(opened, {**HELLO, "response_format": SCHEMA})
    assert opened.dispatcher.requests[-1].reasoning_span == ReasoningSpan((end,), (), None, end)


async def test_markers_without_tokens_of_their_own() -> None:
    """The engine cannot find them: budgets are refused, and a grammar leaves no reasoning."""
    front = reasoning_front(has_markers=False)
    body = await whole(front, HELLO)
    assert body["choices"][0]["message"]["reasoning_content"] == "Let me think."
    assert body["usage"]["completion_tokens_details"]["reasoning_tokens"] > 0
    await whole(front, {**HELLO, "response_format": SCHEMA})
    assert front.dispatcher.requests[-1].reasoning_span is None
    error = check_error(
        await post(front, CHAT, {**HELLO, "thinking_token_budget": 5}), 400, "thinking_token_budget"
    )
    assert "no token for '</think>'" in error["message"]
    opened = reasoning_front(OPENED, has_markers=False)
    check_error(await post(opened, CHAT, {**HELLO, "response_format": SCHEMA}), 400)


async def test_earlier_reasoning_goes_to_the_template() -> None:
    front = reasoning_front()
    for name in ("reasoning_content", "reasoning"):
        said = {"role": "assistant", "content": "Rome.", name: "Easy."}
        await whole(front, {**HELLO, "messages": [*HELLO["messages"], said, *HELLO["messages"]]})
        assert "assistant\n<think>Easy.</think>Rome.<|im_end|>" in prompt_of(front)


async def test_a_message_that_is_continued_in_its_reasoning() -> None:
    front = reasoning_front(text=" think.</think>Paris.")
    begun = {"role": "assistant", "content": "<think>Let me"}
    asked = {
        **HELLO,
        "messages": [*HELLO["messages"], begun],
        "continue_final_message": True,
        "thinking_token_budget": 9,
    }
    (choice,) = (await whole(front, asked))["choices"]
    assert choice["message"]["content"] == "Paris."
    assert choice["message"]["reasoning"] == "think."
    assert prompt_of(front).endswith("assistant\n<think>Let me")
    span = front.dispatcher.requests[-1].reasoning_span
    assert span is not None
    assert span.start == ()
    closed = {**begun, "content": "Par"}
    front.dispatcher.text = "is."
    (choice,) = (await whole(front, {**asked, "messages": [*HELLO["messages"], closed]}))["choices"]
    assert choice["message"]["content"] == "is."
    assert front.dispatcher.requests[-1].reasoning_span is None


async def test_a_model_that_does_not_reason_takes_all_of_it() -> None:
    front = make_front()
    asked = {"reasoning_effort": "low", "enable_thinking": True, "thinking_token_budget": 5}
    body = await whole(front, {**HELLO, **asked})
    assert "reasoning_content" not in body["choices"][0]["message"]
    assert body["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}
    assert front.dispatcher.requests[-1].reasoning_span is None


def _with_the_client(address: str) -> Any:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="-", max_retries=0) as client:
        return client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "Hello"}],
            reasoning_effort="high",
        )


async def test_the_official_client() -> None:
    front = reasoning_front()
    async with serve(front.app()) as address:
        found = await asyncio.to_thread(_with_the_client, address)
    assert found.choices[0].message.content == "Paris."
    assert found.choices[0].message.reasoning_content == "Let me think."
    assert found.usage.completion_tokens_details.reasoning_tokens


# gRPC


def grpc_request(**fields: Any) -> inference_pb2.GenerateRequest:
    messages = [inference_pb2.ChatMessage(role="user", content="Hello")]
    return inference_pb2.GenerateRequest(
        messages=inference_pb2.ChatMessages(messages=messages), **fields
    )


async def test_reasoning_over_grpc() -> None:
    front = reasoning_front()
    options = inference_pb2.ReasoningOptions(budget_tokens=9)
    async with grpc_inference.serve(front) as channel:
        responses = await grpc_inference.generate(channel, grpc_request(reasoning=options))
        hidden = inference_pb2.ReasoningOptions(hidden=True)
        without = await grpc_inference.generate(channel, grpc_request(reasoning=hidden))
    assert "".join(response.reasoning for response in responses) == "Let me think."
    assert "".join(response.text for response in responses) == "Paris."
    assert responses[-1].usage.reasoning_tokens > 0
    assert responses[-1].usage.reasoning_tokens == without[-1].usage.reasoning_tokens
    span = front.dispatcher.requests[0].reasoning_span
    assert span is not None
    assert span.budget == 9
    assert not any(response.reasoning for response in without)
    assert "".join(response.text for response in without) == "Paris."


async def test_batons_own_client_reads_it() -> None:
    front = reasoning_front()
    async with grpc_inference.serve_at(front) as address, AsyncClient(address) as client:
        answer = await client.chat([Message("user", "Hello")])
    assert (answer.reasoning, answer.text) == ("Let me think.", "Paris.")
    assert answer.usage.reasoning_tokens > 0


async def test_what_cannot_be_over_grpc() -> None:
    effort = inference_pb2.ReasoningOptions(effort=inference_pb2.REASONING_EFFORT_NONE)
    for request, words in (
        (inference_pb2.GenerateRequest(prompt="a", reasoning=effort), "requires messages as input"),
        (
            grpc_request(reasoning=inference_pb2.ReasoningOptions(budget_tokens=1 << 31)),
            "reasoning.budget_tokens must be",
        ),
    ):
        error = await grpc_inference.refused(reasoning_front(), request)
        assert words in (error.details() or "")
