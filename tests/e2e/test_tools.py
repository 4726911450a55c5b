"""Tools, responses, messages and tokens with the real model."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from tests.support.e2e.cluster import UpProcess

DEADLINE_S = 120.0
MESSAGES: Any = [{"role": "user", "content": "What is the weather in Paris for two days?"}]
WEATHER: dict[str, Any] = {
    "name": "weather",
    "description": "The weather of a city.",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Paris", "Rome"]}, "days": {"type": "integer"}},
        "required": ["city", "days"],
        "additionalProperties": False,
    },
}
CLOCK: dict[str, Any] = {"name": "clock", "parameters": {"type": "object", "properties": {}}}
TOOLS: Any = [{"type": "function", "function": one} for one in (WEATHER, CLOCK)]


@pytest.fixture
def client(cluster: UpProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{cluster.http}/v1", api_key="none", max_retries=0, timeout=DEADLINE_S
    ) as client:
        yield client


def check_call(name: str, arguments: str) -> None:
    value = json.loads(arguments)
    if name == "weather":
        assert set(value) == {"city", "days"}
        assert value["city"] in {"Paris", "Rome"}
        assert isinstance(value["days"], int)
    else:
        assert name == "clock"
        assert isinstance(value, dict)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize("name", ["weather", "clock"])
def test_a_named_function_is_called(
    cluster: UpProcess, client: openai.OpenAI, name: str, temperature: float
) -> None:
    asked: Any = {
        "model": cluster.model,
        "messages": MESSAGES,
        "tools": TOOLS,
        "tool_choice": {"type": "function", "function": {"name": name}},
        "temperature": temperature,
        "seed": 3,
        "max_tokens": 200,
    }
    whole = client.chat.completions.create(**asked).choices[0]
    assert whole.finish_reason in {"tool_calls", "length"}
    (call,) = whole.message.tool_calls
    assert call.function.name == name
    if whole.finish_reason == "tool_calls":
        check_call(name, call.function.arguments)
        assert whole.message.content is None
    with client.chat.completions.stream(**asked) as events:
        try:
            streamed: Any = events.get_final_completion()
        except openai.LengthFinishReasonError as cut:
            # A clock's arguments may be any object, and so of any length.
            streamed = cut.completion
    (again,) = streamed.choices[0].message.tool_calls
    assert again.function.arguments == call.function.arguments


def test_some_function_is_called(cluster: UpProcess, client: openai.OpenAI) -> None:
    for seed in range(3):
        answer = client.chat.completions.create(
            model=cluster.model,
            messages=MESSAGES,
            tools=TOOLS,
            tool_choice="required",
            seed=seed,
            max_tokens=200,
        ).choices[0]
        calls: Any = answer.message.tool_calls
        assert calls
        whole = calls if answer.finish_reason == "tool_calls" else calls[:-1]
        for call in whole:
            check_call(call.function.name, call.function.arguments)


@pytest.mark.parametrize("strict", [pytest.param(False, marks=pytest.mark.long), True])
def test_a_function_may_be_called(cluster: UpProcess, client: openai.OpenAI, strict: bool) -> None:
    """The model does as before, and calls; what it gave before lacks what strict tools require."""
    before = [one for city in ("Rome", "Oslo", "Madrid") for one in earlier_call(city)]
    asked: Any = {
        "model": cluster.model,
        "messages": [*before, {"role": "user", "content": "What is the weather in Paris?"}],
        "tools": [{"type": "function", "function": {**WEATHER, "strict": strict}}],
        "temperature": 0,
        "max_tokens": 60,
    }
    answer = client.chat.completions.create(**asked).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls or []
    if strict:
        check_call(call.function.name, call.function.arguments)
    else:
        assert json.loads(call.function.arguments) == {"city": "Paris"}


def earlier_call(city: str) -> list[dict[str, Any]]:
    """A turn in which the assistant asked for a city's weather, without the number of days."""
    function = {"name": "weather", "arguments": json.dumps({"city": city})}
    call_id = f"call_{city}"
    return [
        {"role": "user", "content": f"What is the weather in {city}?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": call_id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": call_id, "content": "Sunny."},
        {"role": "assistant", "content": f"It is sunny in {city}."},
    ]


def test_a_result_is_read(cluster: UpProcess, client: openai.OpenAI) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    history: Any = [
        {"role": "user", "content": "What time is it?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "It is noon."},
    ]
    asked: Any = {"model": cluster.model, "messages": history, "tools": TOOLS}
    answer = client.chat.completions.create(**asked, temperature=0, max_tokens=20)
    assert answer.choices[0].finish_reason in {"stop", "length", "tool_calls"}
    assert answer.usage
    assert 0 < answer.usage.completion_tokens <= 20
    with httpx.Client(base_url=cluster.http, trust_env=False, timeout=DEADLINE_S) as http:
        tokens = http.post("/tokenize", json=asked).json()["tokens"]
        prompt = http.post("/detokenize", json={"tokens": tokens}).json()["prompt"]
    assert "It is noon." in prompt
    assert answer.usage.prompt_tokens == len(tokens)


def test_responses(cluster: UpProcess, client: openai.OpenAI) -> None:
    asked: Any = {
        "model": cluster.model,
        "input": "Name three colours.",
        "temperature": 0,
        "max_output_tokens": 24,
    }
    whole = client.responses.create(**asked)
    events: list[Any] = list(client.responses.create(**asked, stream=True))
    assert whole.output_text
    deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text
    assert events[-1].type in {"response.completed", "response.incomplete"}
    assert events[-1].response.output_text == whole.output_text
    assert whole.usage
    assert whole.usage.output_tokens <= 24


def test_a_response_that_must_call(cluster: UpProcess, client: openai.OpenAI) -> None:
    asked: Any = {
        "model": cluster.model,
        "input": "What is the weather in Paris?",
        "tools": [{"type": "function", **WEATHER}],
        "tool_choice": {"type": "function", "name": "weather"},
        "max_output_tokens": 200,
    }
    answer = client.responses.create(**asked)
    (item,) = answer.output
    assert item.type == "function_call"
    check_call(item.name, item.arguments)


def test_messages_and_tokens(cluster: UpProcess) -> None:
    asked = {
        "model": cluster.model,
        "messages": [{"role": "user", "content": "Name three colours."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    with httpx.Client(base_url=cluster.http, trust_env=False, timeout=DEADLINE_S) as http:
        whole = http.post("/v1/messages", json=asked).json()
        stream = http.post("/v1/messages", json={**asked, "stream": True}).text
        counted = http.post("/v1/messages/count_tokens", json=asked).json()
        tokens = http.post("/tokenize", json={"messages": asked["messages"]}).json()
        back = http.post("/detokenize", json={"tokens": tokens["tokens"]}).json()
        info = http.get("/v1/model/info").json()
    events = [json.loads(one.partition("\ndata: ")[2]) for one in stream.split("\n\n") if one]
    deltas = [one["delta"]["text"] for one in events if one["type"] == "content_block_delta"]
    assert "".join(deltas) == whole["content"][0]["text"]
    usage = whole["usage"]
    prompt = usage["input_tokens"] + usage["cache_read_input_tokens"]
    assert counted["input_tokens"] == tokens["count"] == prompt
    assert "Name three colours." in back["prompt"]
    assert (info["id"], info["tool_parser"]) == (cluster.model, "smollm")
