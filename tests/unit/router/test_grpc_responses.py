"""baton.v1.ResponseService on a real server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio
import pytest

from baton import errors
from baton.grammar import Grammar, GrammarKind
from baton.v1 import responses_pb2 as pb
from baton.v1 import responses_pb2_grpc, sampling_pb2, tools_pb2
from router.generation import GenerationRequest, OutputDelta
from tests.unit.router.front_fakes import Front, make_front
from tests.unit.router.responses.test_responses import CALL, TOOL, front_saying, prompt_of, whole
from tests.unit.router.test_grpc_front import serve

DEADLINE_S = 30.0
Request = pb.CreateResponseRequest
WEATHER = tools_pb2.Tools(
    tools=[
        tools_pb2.Tool(
            name="weather",
            description="Tells it.",
            parameters='{"type": "object", "properties": {"city": {"type": "string"}}}',
        )
    ]
)


def said(text: str, role: str = "user") -> pb.InputItem:
    return pb.InputItem(message=pb.InputMessage(role=role, text=text))


@asynccontextmanager
async def asking(front: Front, request: Request, **more: Any) -> AsyncIterator[Any]:
    async with serve(front) as channel:
        stub: Any = responses_pb2_grpc.ResponseServiceStub(channel)
        yield stub.CreateResponse(request, timeout=DEADLINE_S, **more)


async def events_of(front: Front, request: Request) -> list[pb.CreateResponseResponse]:
    async with asking(front, request) as call:
        events = [event async for event in call]
    assert [event.sequence_number for event in events] == list(range(len(events)))
    return events


def kinds(events: list[pb.CreateResponseResponse]) -> list[str]:
    """Their kinds, repetitions of deltas left out."""
    found: list[str] = []
    for event in events:
        kind = str(event.WhichOneof("event"))
        if not found or found[-1] != kind:
            found.append(kind)
    return found


async def test_text() -> None:
    front = front_saying("Grüße 😀")
    request = Request(
        instructions="Be brief.",
        input=[said("hello")],
        sampling=sampling_pb2.SamplingParameters(seed=3, temperature=0.5),
        metadata={"a": "b"},
        priority=4,
    )
    events = await events_of(front, request)
    assert kinds(events) == [
        "created",
        "output_item_added",
        "output_text_delta",
        "output_text_done",
        "output_item_done",
        "done",
    ]
    deltas = [e.output_text_delta for e in events if e.HasField("output_text_delta")]
    assert "".join(delta.delta for delta in deltas) == "Grüße 😀"
    created, done = events[0].created, events[-1].done
    assert created.status == pb.RESPONSE_STATUS_IN_PROGRESS
    assert done.status == pb.RESPONSE_STATUS_COMPLETED
    assert (done.id, done.model, dict(done.metadata)) == (created.id, "tiny", {"a": "b"})
    (item,) = done.output
    assert {delta.item_id for delta in deltas} == {item.id}
    assert item.message.text == "Grüße 😀"
    (asked,) = front.dispatcher.requests
    assert (asked.sampling.seed, asked.sampling.temperature, asked.priority) == (3, 0.5, 4)
    assert done.usage.input_tokens == len(asked.prompt_ids)
    assert done.usage.cached_input_tokens == 1
    assert prompt_of(front).startswith("<|im_start|>system\nBe brief.<|im_end|>\n")
    assert front.requests() == {("short", "ok", ""): 1}


async def test_calls_and_their_results() -> None:
    front = front_saying(f"Look.\n{CALL}")
    events = await events_of(front, Request(input=[said("weather?")], tools=WEATHER))
    text, call = events[-1].done.output
    assert text.message.text == "Look."
    assert (call.function_call.name, call.function_call.arguments) == (
        "weather",
        '{"city": "Köln"}',
    )
    pieces = [e.function_call_arguments_delta for e in events]
    assert "".join(piece.delta for piece in pieces) == call.function_call.arguments
    again = front_saying("Warm.")
    earlier = tools_pb2.ToolCall(
        id=call.function_call.call_id, name="weather", arguments=call.function_call.arguments
    )
    result = pb.FunctionCallOutput(call_id=earlier.id, output="warm")
    items = [
        said("weather?"),
        pb.InputItem(function_call=earlier),
        pb.InputItem(function_call_output=result),
    ]
    await events_of(again, Request(input=items, tools=WEATHER))
    same = front_saying("Warm.")
    await whole(
        same,
        {
            "model": "tiny",
            "tools": [TOOL],
            "input": [
                {"role": "user", "content": "weather?"},
                {
                    "type": "function_call",
                    "call_id": earlier.id,
                    "name": "weather",
                    "arguments": earlier.arguments,
                },
                {"type": "function_call_output", "call_id": earlier.id, "output": "warm"},
            ],
        },
    )
    assert prompt_of(again) == prompt_of(same)


async def test_an_answer_that_is_cut_short() -> None:
    request = Request(input=[said("hello")], sampling=sampling_pb2.SamplingParameters(max_tokens=2))
    events = await events_of(front_saying("one two three"), request)
    done = events[-1].done
    assert done.status == pb.RESPONSE_STATUS_INCOMPLETE
    assert done.output[0].status == pb.RESPONSE_STATUS_INCOMPLETE
    assert done.usage.output_tokens == 2


async def test_a_grammar() -> None:
    front = front_saying("{}")
    grammar = sampling_pb2.Grammar(json_object=sampling_pb2.JsonObject())
    sampling = sampling_pb2.SamplingParameters(grammar=grammar)
    await events_of(front, Request(input=[said("hello")], sampling=sampling))
    (asked,) = front.dispatcher.requests
    assert asked.sampling.grammar == Grammar(GrammarKind.JSON_OBJECT, "")


@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (Request(), grpc.StatusCode.INVALID_ARGUMENT),
        (Request(input=[pb.InputItem()]), grpc.StatusCode.INVALID_ARGUMENT),
        (Request(input=[said("a", "robot")]), grpc.StatusCode.INVALID_ARGUMENT),
        (Request(input=[said("a")], model="other"), grpc.StatusCode.NOT_FOUND),
        (
            Request(input=[said("a")], sampling=sampling_pb2.SamplingParameters(logprobs=1)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (
            Request(input=[said("a")], sampling=sampling_pb2.SamplingParameters(top_p=7)),
            grpc.StatusCode.INVALID_ARGUMENT,
        ),
        (Request(input=[said("a" * 3000)]), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_bad_requests(request_: Request, status: grpc.StatusCode) -> None:
    front = make_front(max_body_bytes=2000)
    async with asking(front, request_) as call:
        assert await call.code() is status
        assert await call.details()
    assert not front.dispatcher.requests
    assert sum(front.requests().values()) == 1


async def test_a_failure_on_the_way() -> None:
    async def breaks(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("some ", (65,), None)
        raise errors.WorkerFailed("it died")

    async with asking(make_front(breaks), Request(input=[said("a")])) as call:
        events: list[pb.CreateResponseResponse] = []

        async def read() -> None:
            async for event in call:
                events.append(event)

        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read()
        assert kinds(events) == ["created", "output_item_added", "output_text_delta"]
    assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    assert caught.value.details() == "it died"


async def test_keys() -> None:
    front = make_front(require_key=True)
    async with asking(front, Request(input=[said("a")])) as call:
        assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
