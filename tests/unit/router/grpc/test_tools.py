"""Tools over gRPC: the same as over HTTP, in messages."""

from __future__ import annotations

import json

import grpc
import pytest

from baton.v1 import inference_pb2, tools_pb2
from tests.support.router.front_fakes import Front, make_front
from tests.support.router.grpc_inference import generate, refused, serve
from tests.support.router.tool_answers import PARAMETERS, TWO_CALLS

Message = inference_pb2.ChatMessage
Request = inference_pb2.GenerateRequest
WEATHER = tools_pb2.Tool(name="weather", description="Tells it.", parameters=json.dumps(PARAMETERS))
CLOCK = tools_pb2.Tool(name="clock")
ASKED = [Message(role="user", content="Weather?")]


def request_of(
    tools: tools_pb2.Tools | None = None, messages: list[Message] = ASKED, n: int = 0
) -> Request:
    return Request(messages=inference_pb2.ChatMessages(messages=messages), tools=tools, n=n)


def front_saying(text: str) -> Front:
    front = make_front(context=4096)
    front.dispatcher.text = text
    return front


def prompt_of(front: Front) -> str:
    return front.tokenizer.decode(front.dispatcher.requests[0].prompt_ids)


async def test_calls() -> None:
    front = front_saying(TWO_CALLS)
    async with serve(front) as channel:
        tools = tools_pb2.Tools(tools=[WEATHER, CLOCK])
        responses = await generate(channel, request_of(tools, n=2))
    assert "Tells it." in prompt_of(front)
    for choice in (0, 1):
        own = [response for response in responses if response.choice == choice]
        assert "".join(response.text for response in own) == "Let me see."
        parts = [part for response in own for part in response.tool_calls]
        assert [(part.index, part.name) for part in parts if part.id] == [
            (0, "weather"),
            (1, "clock"),
        ]
        assert "".join(part.arguments for part in parts if part.index == 0) == '{"city": "Köln"}'
        assert "".join(part.arguments for part in parts if part.index == 1) == "{}"
        assert own[-1].finish_reason == inference_pb2.FINISH_REASON_STOP


async def test_calls_that_must_be() -> None:
    front = front_saying(TWO_CALLS)
    tools = tools_pb2.Tools(
        tools=[WEATHER, CLOCK],
        mode=tools_pb2.TOOL_MODE_REQUIRED,
        allowed=["clock"],
        single=True,
    )
    async with serve(front) as channel:
        await generate(channel, request_of(tools))
    grammar = front.dispatcher.requests[0].sampling.grammar
    assert grammar is not None
    assert "clock" in grammar.text
    assert "weather" not in grammar.text


async def test_no_tools() -> None:
    front = front_saying(TWO_CALLS)
    tools = tools_pb2.Tools(tools=[WEATHER], mode=tools_pb2.TOOL_MODE_NONE)
    async with serve(front) as channel:
        responses = await generate(channel, request_of(tools))
    assert "".join(response.text for response in responses) == TWO_CALLS
    assert "Tells it." not in prompt_of(front)


async def test_earlier_calls() -> None:
    front = front_saying("It rains.")
    call = tools_pb2.ToolCall(id="1", name="weather", arguments='{"city":"Köln"}')
    messages = [
        *ASKED,
        Message(role="assistant", tool_calls=[call]),
        Message(role="tool", tool_call_id="1", content="rain"),
    ]
    async with serve(front) as channel:
        await generate(channel, request_of(messages=messages))
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in prompt_of(front)
    assert "<tool_response>\nrain\n</tool_response>" in prompt_of(front)


CALL = tools_pb2.ToolCall(id="1", name="f")
BAD: list[tuple[Request, str]] = [
    (Request(prompt="x", tools=tools_pb2.Tools(tools=[CLOCK])), "requires messages"),
    (request_of(tools_pb2.Tools(tools=[tools_pb2.Tool()])), "name"),
    (request_of(tools_pb2.Tools(tools=[tools_pb2.Tool(name="f", parameters="{")])), "JSON"),
    (request_of(tools_pb2.Tools(tools=[tools_pb2.Tool(name="f", parameters="[]")])), "object"),
    (
        request_of(tools_pb2.Tools(tools=[CLOCK], allowed=["x"])),
        '"x", which is not among the tools',
    ),
    (request_of(tools_pb2.Tools(mode=tools_pb2.TOOL_MODE_REQUIRED)), "requires tools"),
    (request_of(messages=[Message(role="user", tool_calls=[CALL])]), "only an assistant"),
    (
        request_of(messages=[Message(role="assistant", tool_calls=[tools_pb2.ToolCall()])]),
        "characters",
    ),
]


@pytest.mark.parametrize(("request_", "words"), BAD)
async def test_bad_requests(request_: Request, words: str) -> None:
    error = await refused(make_front(), request_)
    assert error.code() == grpc.StatusCode.INVALID_ARGUMENT
    assert words in (error.details() or "")
