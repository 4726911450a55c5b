"""``/v1/responses``: what is asked, what the model sees, what the client gets."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from baton import errors
from baton.grammar import Grammar, GrammarKind
from router.core.request import GenerationRequest, OutputDelta
from tests.support.router.front_fakes import Front, make_front, serve
from tests.support.router.http_app import check_error, post

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"model": "tiny", "input": "Weather?"}
TOOL = {
    "type": "function",
    "name": "weather",
    "description": "Tells it.",
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


def front_saying(text: str, **options: Any) -> Front:
    front = make_front(context=4096, **options)
    front.dispatcher.text = text
    return front


async def whole(front: Front, body: dict[str, Any]) -> dict[str, Any]:
    response = await post(front, PATH, body)
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    Response.model_validate(value)
    return value


async def stream(front: Front, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await post(front, PATH, {**body, "stream": True})
    assert response.headers["content-type"].startswith("text/event-stream")
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        EVENT.validate_python(event)
        events.append(event)
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    return events


def prompt_of(front: Front) -> str:
    (request,) = front.dispatcher.requests
    return front.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)


async def test_text() -> None:
    front = front_saying("It rains.")
    body = await whole(front, {**HELLO, "instructions": "Be brief.", "metadata": {"a": "b"}})
    assert body["status"] == "completed"
    (item,) = body["output"]
    assert item["role"] == "assistant"
    assert item["content"] == [
        {"type": "output_text", "text": "It rains.", "annotations": [], "logprobs": []}
    ]
    assert (body["store"], body["metadata"], body["instructions"]) == (
        False,
        {"a": "b"},
        "Be brief.",
    )
    (request,) = front.dispatcher.requests
    usage = body["usage"]
    assert usage["input_tokens"] == len(request.prompt_ids)
    assert usage["input_tokens_details"]["cached_tokens"] == 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert prompt_of(front).startswith(
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nWeather?"
    )
    assert front.requests() == {("short", "ok", ""): 1}


async def test_events_of_a_text() -> None:
    front = front_saying("It rains 😀.")
    events = await stream(front, HELLO)
    kinds = [kind for kind, _ in itertools.groupby(event["type"] for event in events)]
    assert kinds == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    deltas = [event for event in events if event["type"] == "response.output_text.delta"]
    assert "".join(event["delta"] for event in deltas) == "It rains 😀."
    assert len(deltas) > 2
    final = events[-1]["response"]
    assert final["output"][0]["content"][0]["text"] == "It rains 😀."
    assert final["usage"]["output_tokens"] > 2
    assert len({event["response"]["id"] for event in events if "response" in event}) == 1
    assert events[0]["response"]["status"] == "in_progress"
    assert {event["item_id"] for event in deltas} == {final["output"][0]["id"]}


async def test_calls() -> None:
    front = front_saying(f"Let me see.\n{CALL}\n{CALL}")
    body = await whole(front, {**HELLO, "tools": [TOOL]})
    text, first, second = body["output"]
    assert text["content"][0]["text"] == "Let me see."
    assert (first["type"], first["name"], first["status"]) == (
        "function_call",
        "weather",
        "completed",
    )
    assert json.loads(first["arguments"]) == {"city": "Köln"}
    assert first["call_id"] != second["call_id"]
    assert body["tools"][0]["name"] == "weather"
    assert body["tool_choice"] == "auto"
    assert "Tells it." in prompt_of(front)


async def test_events_of_calls() -> None:
    front = front_saying(f"{CALL}\n{CALL}")
    events = await stream(front, {**HELLO, "tools": [TOOL]})
    kinds = [kind for kind, _ in itertools.groupby(event["type"] for event in events)]
    call = [
        "response.output_item.added",
        "response.function_call_arguments.delta",
        "response.function_call_arguments.done",
        "response.output_item.done",
    ]
    begin = ["response.created", "response.in_progress"]
    assert kinds == [*begin, *call, *call, "response.completed"]
    final = events[-1]["response"]["output"]
    for index, item in enumerate(final):
        own = [event for event in events if event.get("output_index") == index]
        parts = [e["delta"] for e in own if e["type"].endswith("arguments.delta")]
        assert "".join(parts) == item["arguments"]
        assert len(parts) > 2
        assert own[0]["item"] == {**item, "status": "in_progress", "arguments": ""}
        assert own[-1]["item"] == item
        assert own[-2]["arguments"] == item["arguments"]


async def test_an_answer_that_is_cut_short() -> None:
    front = front_saying("one two three four")
    asked = {**HELLO, "max_output_tokens": 3}
    body = await whole(front, asked)
    assert body["status"] == "incomplete"
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}
    assert body["output"][-1]["status"] == "incomplete"
    assert body["max_output_tokens"] == 3
    events = await stream(front, asked)
    assert events[-1]["type"] == "response.incomplete"
    assert events[-1]["response"]["output"][-1]["status"] == "incomplete"


async def test_an_empty_answer() -> None:
    body = await whole(front_saying(""), HELLO)
    assert body["output"][0]["content"][0]["text"] == ""
    events = await stream(front_saying(""), HELLO)
    assert [event["type"] for event in events][-3:] == [
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]


async def test_items() -> None:
    front = front_saying("x")
    items = [
        {"role": "developer", "content": "Be brief."},
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "Rain?"}]},
        {"type": "reasoning", "id": "r", "summary": []},
        {"role": "assistant", "content": [{"type": "output_text", "text": "I look."}]},
        {"type": "function_call", "call_id": "1", "name": "weather", "arguments": '{"a":1}'},
        {"type": "function_call", "call_id": "2", "name": "weather", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "wet"},
        {
            "type": "function_call_output",
            "call_id": "2",
            "output": [{"type": "input_text", "text": "dry"}],
        },
    ]
    await whole(front, {"model": "tiny", "input": items, "tools": [TOOL]})
    prompt = prompt_of(front)
    assert prompt.count("<|im_start|>assistant") == 2
    assert 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"a": 1}}' in prompt
    assert "<tool_response>\nwet\n</tool_response>" in prompt
    assert "<tool_response>\ndry\n</tool_response>" in prompt


@pytest.mark.parametrize(
    ("choice", "required", "single"),
    [
        ("auto", False, False),
        ("required", True, False),
        ({"type": "function", "name": "weather"}, True, True),
        (
            {
                "type": "allowed_tools",
                "mode": "required",
                "tools": [{"type": "function", "name": "weather"}],
            },
            True,
            False,
        ),
    ],
)
async def test_choices(choice: Any, required: bool, single: bool) -> None:
    front = front_saying(CALL)
    body = await whole(front, {**HELLO, "tools": [TOOL], "tool_choice": choice})
    assert body["tool_choice"] == choice
    grammar = front.dispatcher.requests[0].sampling.grammar
    assert (grammar is not None) == required
    if grammar is not None:
        assert ("call)*" not in grammar.text) == single


async def test_formats() -> None:
    front = front_saying("{}")
    schema = {"type": "object", "properties": {}}
    form = {"type": "json_schema", "name": "x", "schema": schema, "strict": True}
    body = await whole(front, {**HELLO, "text": {"format": form}})
    assert body["text"]["format"] == form
    await whole(front, {**HELLO, "text": {"format": {"type": "json_object"}}})
    await whole(front, {**HELLO, "text": {"format": {"type": "text"}}})
    assert [request.sampling.grammar for request in front.dispatcher.requests] == [
        Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema)),
        Grammar(GrammarKind.JSON_OBJECT, ""),
        None,
    ]


async def test_a_failure_on_the_way() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("x", (65,), None)
        raise errors.WorkerFailed("a worker died")

    events = await stream(make_front(script), HELLO)
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["message"] == "a worker died"


async def test_a_failure_before_the_first_token() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        raise errors.Overloaded("too much")
        yield

    response = await post(make_front(script), PATH, {**HELLO, "stream": True})
    check_error(response, 429)


HARMLESS = {
    "store": True,
    "previous_response_id": None,
    "background": False,
    "truncation": "disabled",
    "include": ["reasoning.encrypted_content"],
    "reasoning": {"effort": "low"},
    "stream_options": {"include_obfuscation": False},
    "user": "me",
    "n": 1,
    "prompt_cache_key": "x",
    "tools": [],
    "tool_choice": "none",
    "not_known": None,
}


async def test_harmless_fields() -> None:
    body = await whole(front_saying("x"), {**HELLO, **HARMLESS})
    assert body["store"] is False


def asking(**fields: Any) -> dict[str, Any]:
    return {**HELLO, **fields}


BAD: list[tuple[dict[str, Any], str]] = [
    (asking(previous_response_id="resp_1"), "previous_response_id"),
    (asking(background=True), "background"),
    (asking(conversation="x"), "conversation"),
    (asking(n=2), "n"),
    (asking(logprobs=True), "logprobs"),
    (asking(include="x"), "include"),
    (asking(include=[{}]), "include"),
    (asking(prompt={"id": "x"}), "prompt"),
    (asking(input=[]), "input"),
    (asking(input=5), "input"),
    (asking(input=[5]), "input"),
    (asking(input=[{"role": "system", "content": "x"}]), "input"),
    (asking(input=[{"role": "x", "content": "x"}]), "input[0].role"),
    (asking(input=[{"content": "x"}]), "input[0].role"),
    (asking(input=[{"role": "user"}]), "input[0].content"),
    (asking(input=[{"role": "user", "content": [5]}]), "input[0].content[0]"),
    (
        asking(input=[{"role": "user", "content": [{"type": "input_image"}]}]),
        "input[0].content[0]",
    ),
    (asking(input=[{"type": "item_reference", "id": "x"}]), "input[0]"),
    (asking(input=[{"type": "web_search_call"}]), "input"),
    (asking(input=[{"type": "mesage"}]), "input[0]"),
    (asking(input=[{"type": []}]), "input[0]"),
    (asking(input=[{"type": "function_call", "name": "x"}]), "input[0].call_id"),
    (asking(input=[{"type": "function_call_output", "output": "x"}]), "input[0].call_id"),
    (asking(tools=[{"type": "function"}]), "tools[0].name"),
    (asking(tools=[{**TOOL, "parameters": 5}]), "tools[0].parameters"),
    (asking(tools=[{**TOOL, "strict": 5}]), "tools[0].strict"),
    (asking(tools=[{**TOOL, "name": "a b"}]), "tools[0].name"),
    (asking(tools=[TOOL], tool_choice="x"), "tool_choice"),
    (asking(tools=[TOOL], tool_choice={"type": "function", "name": "y"}), "tool_choice"),
    (asking(text={"format": {"type": "xml"}}), "text.format.type"),
    (asking(text={"format": {"type": "json_schema", "name": "x"}}), "text.format.schema"),
    (asking(text={"format": 5}), "text.format"),
    (asking(temperature=3), "temperature"),
    (asking(max_output_tokens=0), "max_output_tokens"),
    (
        asking(tools=[TOOL], tool_choice="required", text={"format": {"type": "json_object"}}),
        "tool_choice",
    ),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_bad_requests(body: dict[str, Any], param: str) -> None:
    front = make_front(context=4096)
    error = check_error(await post(front, PATH, body), 400, param)
    assert len(error["message"]) < 300
    assert not front.dispatcher.requests
    assert sum(front.requests().values()) == 1


def _with_the_client(address: str) -> tuple[Any, Any]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {**HELLO, "tools": [TOOL]}
        answer = client.responses.create(**asked)
        with client.responses.stream(**asked) as events:
            for _ in events:
                pass
            streamed = events.get_final_response()
        return answer, streamed


async def test_the_official_client() -> None:
    front = front_saying(f"Let me see. {CALL}")
    async with serve(front.app()) as address:
        for answer in await asyncio.to_thread(_with_the_client, address):
            assert answer.output_text == "Let me see."
            call = answer.output[1]
            assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Köln"})


PATCH = {
    "type": "custom",
    "name": "patch",
    "description": "Edits files.",
    "format": {"type": "grammar", "syntax": "lark", "definition": "start: /.+/"},
}
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "*** Begin\\nx"}}\n</tool_call>'


async def test_a_custom_tool_is_called_with_text() -> None:
    front = front_saying(PATCHED)
    body = await whole(front, {**HELLO, "tools": [TOOL, PATCH]})
    (item,) = body["output"]
    assert (item["type"], item["name"], item["input"]) == (
        "custom_tool_call",
        "patch",
        "*** Begin\nx",
    )
    assert "arguments" not in item
    assert "start: /.+/" in prompt_of(front)
    events = await stream(front_saying(PATCHED), {**HELLO, "tools": [PATCH]})
    kinds = [event["type"] for event in events]
    assert "response.function_call_arguments.delta" not in kinds
    told = [event for event in events if "custom_tool_call_input" in event["type"]]
    assert [event["type"].rpartition(".")[2] for event in told] == ["delta", "done"]
    assert told[0]["delta"] == told[1]["input"] == "*** Begin\nx"


async def test_tools_that_servers_run_are_left_out_and_those_of_a_namespace_are_not() -> None:
    front = front_saying("x")
    hosted = [{"type": "web_search"}, {"type": "local_shell"}, {"type": "tool_search"}]
    space = {"type": "namespace", "name": "n", "description": "d", "tools": [TOOL]}
    choice = {"type": "allowed_tools", "mode": "auto", "tools": [{"type": "web_search"}]}
    await whole(front, {**HELLO, "tools": [*hosted, space], "tool_choice": choice})
    assert "Tells it." in prompt_of(front)
    for forced in ("required", {"type": "web_search_preview"}):
        await whole(front_saying("x"), {**HELLO, "tools": hosted, "tool_choice": forced})


async def test_a_maximum_beyond_the_room_is_cut() -> None:
    front = front_saying("x")
    await whole(front, {**HELLO, "max_output_tokens": 128_000})
    (request,) = front.dispatcher.requests
    assert request.sampling.max_tokens == 4096 - len(request.prompt_ids)


@pytest.mark.parametrize("effort", ["xhigh", "max"])
async def test_an_effort_that_the_model_lacks_is_its_nearest(effort: str) -> None:
    await whole(front_saying("x"), {**HELLO, "reasoning": {"effort": effort}})
