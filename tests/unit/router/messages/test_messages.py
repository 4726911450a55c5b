"""``/v1/messages``: what is asked, what the model sees, what the client gets."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from baton import errors
from baton.config.access import KeyConfig
from baton.grammar import Grammar, GrammarKind
from baton.request import FinishReason
from router.core.request import GenerationRequest, OutputDelta
from tests.support.router.front_fakes import Front, make_front
from tests.support.router.http_app import post

PATH = "/v1/messages"
HELLO: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "Weather?"}],
}
TOOL = {
    "name": "weather",
    "description": "Tells it.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}},
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'


def front_saying(text: str, **options: Any) -> Front:
    front = make_front(context=4096, **options)
    front.dispatcher.text = text
    return front


async def whole(front: Front, body: dict[str, Any]) -> dict[str, Any]:
    response = await post(front, PATH, body)
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    assert value["type"] == "message"
    assert value["role"] == "assistant"
    assert value["model"] == "tiny"
    assert value["id"].startswith("msg_")
    return value


async def stream(front: Front, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await post(front, PATH, {**body, "stream": True})
    events = []
    for block in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def put_together(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The content of a streamed answer, as its clients make it; checks the order of events."""
    assert [events[0]["type"], *(e["type"] for e in events[-2:])] == [
        "message_start",
        "message_delta",
        "message_stop",
    ]
    blocks: list[dict[str, Any]] = []
    is_open = False
    for event in events[1:-2]:
        match event["type"]:
            case "content_block_start":
                assert not is_open
                assert event["index"] == len(blocks)
                blocks.append(dict(event["content_block"]))
                is_open = True
            case "content_block_stop":
                assert is_open
                is_open = False
            case _:
                assert is_open
                delta = event["delta"]
                key = "text" if delta["type"] == "text_delta" else "partial_json"
                blocks[-1][key] = blocks[-1].get(key, "") + delta[key]
        assert event["index"] == len(blocks) - 1
    assert not is_open
    for block in blocks:
        if block["type"] == "tool_use":
            assert block["input"] == {}
            block["input"] = json.loads(block.pop("partial_json"))
    return blocks


def without_ids(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in b.items() if name != "id"} for b in blocks]


def prompt_of(front: Front) -> str:
    (request,) = front.dispatcher.requests
    return front.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)


async def test_text() -> None:
    front = front_saying("It rains.")
    body = await whole(front, {**HELLO, "system": [{"type": "text", "text": "Be brief."}]})
    assert body["content"] == [{"type": "text", "text": "It rains."}]
    assert (body["stop_reason"], body["stop_sequence"]) == ("end_turn", None)
    prompt_tokens = len(front.dispatcher.requests[0].prompt_ids)
    usage = body["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == prompt_tokens
    assert usage["output_tokens"] > 1
    assert prompt_of(front).startswith("<|im_start|>system\nBe brief.<|im_end|>")
    assert front.dispatcher.requests[0].sampling.max_tokens == 1000


async def test_streamed_text() -> None:
    front = front_saying("It rains 😀.")
    answer = await whole(front, HELLO)
    events = await stream(front, HELLO)
    assert put_together(events) == answer["content"]
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["usage"]["input_tokens"] == answer["usage"]["input_tokens"]
    assert events[-2]["delta"] == {"stop_reason": "end_turn", "stop_sequence": None}
    assert events[-2]["usage"] == answer["usage"]


@pytest.mark.parametrize("text", ["It rains.", f"It rains.\n{CALL}"])
async def test_the_stop_sequence_that_ended_an_answer_is_reported(text: str) -> None:
    front = front_saying(text)
    asked = {**HELLO, "stop_sequences": ["never", "ains", "in"], "tools": [TOOL]}
    answer = await whole(front, asked)
    assert answer["content"] == [{"type": "text", "text": "It ra"}]
    assert (answer["stop_reason"], answer["stop_sequence"]) == ("stop_sequence", "in")
    events = await stream(front, asked)
    assert put_together(events) == answer["content"]
    assert events[-2]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "in"}
    cut = await whole(front, {**asked, "max_tokens": 1})
    assert (cut["stop_reason"], cut["stop_sequence"]) == ("max_tokens", None)


async def test_calls() -> None:
    front = front_saying(f"Let me see.\n{CALL}\n{CALL}")
    asked = {**HELLO, "tools": [TOOL]}
    answer = await whole(front, asked)
    text, first, second = answer["content"]
    assert text == {"type": "text", "text": "Let me see."}
    assert (first["type"], first["name"]) == ("tool_use", "weather")
    assert first["input"] == second["input"] == {"city": "Köln"}
    assert first["id"] != second["id"]
    assert answer["stop_reason"] == "tool_use"
    assert "Tells it." in prompt_of(front)
    events = await stream(front, asked)
    assert without_ids(put_together(events)) == without_ids(answer["content"])
    assert events[-2]["delta"]["stop_reason"] == "tool_use"


async def test_a_call_that_is_cut_short() -> None:
    front = front_saying(CALL)
    most = len(front.tokenizer.encode(CALL.partition("}}")[0]))
    answer = await whole(front, {**HELLO, "tools": [TOOL], "max_tokens": most})
    assert answer["stop_reason"] == "max_tokens"
    assert answer["content"] == [{"type": "text", "text": 'weather {"city": "Köln"'}]


async def test_stop_sequences() -> None:
    answer = await whole(front_saying("one two three"), {**HELLO, "stop_sequences": ["two"]})
    assert answer["content"] == [{"type": "text", "text": "one "}]


async def test_blocks() -> None:
    front = front_saying("x")
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "Rain?", "cache_control": None}]},
        {
            "role": "assistant",
            "content": [
                {"type": "thinking", "thinking": "hm", "signature": "s"},
                {"type": "text", "text": "I look."},
                {"type": "tool_use", "id": "1", "name": "weather", "input": {"city": "Köln"}},
            ],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": "none", "is_error": True},
                {"type": "text", "text": "And now?"},
            ],
        },
    ]
    await whole(front, {**HELLO, "messages": messages, "tools": [TOOL]})
    prompt = prompt_of(front)
    assert 'I look.\n<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}' in prompt
    assert "<tool_response>\nError: none\n</tool_response>" in prompt
    assert prompt.index("Error: none") < prompt.index("And now?")
    assert "hm" not in prompt


@pytest.mark.parametrize(
    ("choice", "required"),
    [
        ({"type": "auto"}, False),
        ({"type": "any"}, True),
        ({"type": "tool", "name": "weather"}, True),
    ],
)
async def test_choices(choice: dict[str, Any], required: bool) -> None:
    front = front_saying(CALL)
    await whole(front, {**HELLO, "tools": [TOOL], "tool_choice": choice})
    assert (front.dispatcher.requests[0].sampling.grammar is not None) == required


async def test_tokens_are_counted() -> None:
    front = front_saying("x")
    asked = {**HELLO, "tools": [TOOL]}
    response = await post(front, f"{PATH}/count_tokens", asked)
    await whole(front, asked)
    assert response.json() == {"input_tokens": len(front.dispatcher.requests[0].prompt_ids)}


def asking(**fields: Any) -> dict[str, Any]:
    return {**HELLO, **fields}


ASKED = {"role": "user", "content": "Weather?"}
CALLED = [{"type": "tool_use", "id": "1", "name": "weather", "input": {}}]
BAD: list[tuple[dict[str, Any], str]] = [
    ({**HELLO, "max_tokens": None}, "max_tokens"),
    (asking(messages=[]), "messages"),
    (asking(messages=[{"role": "tool", "content": "x"}]), "role"),
    (asking(messages=[{"role": "user", "content": None}]), "content"),
    (asking(messages=[{"role": "user", "content": []}]), "content"),
    (asking(messages=[{"role": "user", "content": [{"type": "image"}]}]), "image"),
    (asking(messages=[{"role": "user", "content": [{}]}]), "type"),
    (asking(messages=[ASKED, {"role": "assistant", "content": CALLED}]), "last message"),
    (
        asking(messages=[{"role": "assistant", "content": [{"type": "tool_use"}]}]),
        "name must be a string",
    ),
    (asking(messages=[{"role": "user", "content": [{"type": "tool_result"}]}]), "tool_use_id"),
    (asking(tools=[{"name": "x"}]), "input_schema"),
    (asking(tools=[TOOL], tool_choice={"type": "x"}), "tool_choice"),
    (asking(thinking={"type": "enabled", "budget_tokens": 1000}), "thinking.budget_tokens"),
    (asking(thinking={"type": "enabled", "budget_tokens": -5}), "thinking.budget_tokens"),
    (asking(thinking={"type": "always"}), "thinking.type"),
    (asking(temperature=-1), "temperature"),
]


@pytest.mark.parametrize(("body", "words"), BAD)
async def test_bad_requests(body: dict[str, Any], words: str) -> None:
    front = make_front(context=4096)
    response = await post(front, PATH, body)
    check_error(response, 400, "invalid_request_error")
    assert words in response.json()["error"]["message"]
    assert not front.dispatcher.requests


def check_error(response: httpx.Response, status: int, kind: str) -> None:
    assert response.status_code == status, response.text
    body = response.json()
    assert set(body) == {"type", "error"}
    assert body["type"] == "error"
    assert body["error"]["type"] == kind
    assert body["error"]["message"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (errors.Overloaded("too much"), 429, "rate_limit_error"),
        (errors.Unavailable("nobody"), 503, "overloaded_error"),
        (errors.BatonError("odd"), 500, "api_error"),
    ],
)
async def test_errors_before_the_first_token(
    error: errors.BatonError, status: int, kind: str, streams: bool
) -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        raise error
        yield

    response = await post(make_front(script, context=4096), PATH, {**HELLO, "stream": streams})
    check_error(response, status, kind)


async def test_an_error_on_the_way() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("x", (65,), None)
        raise errors.WorkerFailed("a worker died")

    events = await stream(make_front(script, context=4096), HELLO)
    assert events[-1] == {
        "type": "error",
        "error": {"type": "overloaded_error", "message": "a worker died"},
    }


async def test_other_models_and_keys() -> None:
    response = await post(front_saying("x"), PATH, {**HELLO, "model": "other"})
    check_error(response, 404, "not_found_error")
    keys = (KeyConfig(name="one", tenant="default", sha256=hashlib.sha256(b"secret").hexdigest()),)
    front = front_saying("x", keys=keys, require_key=True)
    check_error(await post(front, PATH, HELLO), 401, "authentication_error")
    headers = {"x-api-key": "secret", "anthropic-version": "2023-06-01"}
    assert (await post(front, PATH, HELLO, headers=headers)).status_code == 200


async def test_a_maximum_beyond_the_room_is_cut_and_named_as_the_stop_reason() -> None:
    async def script(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        yield OutputDelta("x", (65,), FinishReason.LENGTH)

    front = make_front(script, context=4096)
    body = await whole(front, {**HELLO, "max_tokens": 32_000})
    assert body["stop_reason"] == "model_context_window_exceeded"
    (request,) = front.dispatcher.requests
    assert request.sampling.max_tokens == 4096 - len(request.prompt_ids)
    assert (await whole(front, HELLO))["stop_reason"] == "max_tokens"


async def test_the_format_of_an_answer() -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"]}
    form = {"type": "json_schema", "schema": schema}
    for given in ({"output_config": {"format": form}}, {"output_format": form}):
        front = front_saying('{"ok": true}')
        await whole(front, {**HELLO, **given})
        (request,) = front.dispatcher.requests
        assert request.sampling.grammar == Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


async def test_fields_of_anthropic_s_clients_are_served() -> None:
    front = front_saying("x")
    asked = {
        "thinking": {"type": "adaptive"},
        "output_config": {"effort": "xhigh"},
        "context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]},
        "mcp_servers": [{"type": "url", "name": "x", "url": "https://example.com"}],
        "metadata": {"user_id": "x"},
        "tools": [
            TOOL,
            {"type": "bash_20250124", "name": "bash"},
            {"type": "web_search_20250305", "name": "web_search", "max_uses": 3},
        ],
        "tool_choice": {"type": "tool", "name": "web_search"},
    }
    await whole(front, {**HELLO, **asked})
    (request,) = front.dispatcher.requests
    prompt = front.tokenizer.decode(request.prompt_ids)
    assert "Tells it." in prompt
    assert "bash" not in prompt


async def test_a_choice_of_tools_that_were_all_left_out_is_none() -> None:
    front = front_saying("x")
    hosted = {"type": "bash_20250124", "name": "bash"}
    await whole(front, {**HELLO, "tools": [hosted], "tool_choice": {"type": "any"}})
    name = "mcp__" + "x" * 120
    long = {**TOOL, "name": name}
    await whole(front_saying("x"), {**HELLO, "tools": [long]})
