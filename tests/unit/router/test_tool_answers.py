"""Tool calls through the HTTP front: what is asked, what the model sees, what the client gets."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import openai
import pytest
import tokenizers

from baton.grammar import GrammarKind
from router.text.chat_template import ChatTemplate
from router.text.tokenizer import Tokenizer
from tests.support.router.front_fakes import (
    TEMPLATE,
    Front,
    check_schema,
    make_front,
    plain_client,
    serve,
    sse_payloads,
    tiny_backend,
)
from tests.support.router.http_app import check_error, post
from tests.support.router.tool_answers import (
    CHAT,
    CLOCK,
    HELLO,
    TOOLS,
    TWO_CALLS,
    WEATHER,
    front_saying,
)


async def stream(front: Front, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await post(front, CHAT, {**body, "stream": True})
    payloads = sse_payloads(response.text)
    assert payloads[-1] == "[DONE]"
    chunks = [json.loads(payload) for payload in payloads[:-1]]
    for chunk in chunks:
        check_schema(chunk, "CreateChatCompletionStreamResponse")
    return chunks


def prompt_of(front: Front) -> str:
    (request,) = front.dispatcher.requests
    return front.tokenizer.decode(request.prompt_ids)


async def test_calls() -> None:
    front = front_saying(TWO_CALLS)
    body = (await post(front, CHAT, {**HELLO, **TOOLS})).json()
    check_schema(body, "CreateChatCompletionResponse")
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    message = choice["message"]
    assert message["content"] == "Let me see."
    first, second = message["tool_calls"]
    assert first["function"] == {"name": "weather", "arguments": '{"city": "Köln"}'}
    assert second["function"] == {"name": "clock", "arguments": "{}"}
    assert {first["type"], second["type"]} == {"function"}
    assert first["id"].startswith("call_")
    assert first["id"] != second["id"]
    prompt = prompt_of(front)
    assert '"Tells it."' in prompt
    assert "<tool_call>" in prompt


async def test_streamed_calls() -> None:
    front = front_saying(TWO_CALLS)
    whole = (await post(front, CHAT, {**HELLO, **TOOLS})).json()["choices"][0]["message"]
    chunks = await stream(front, {**HELLO, **TOOLS})
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    finishes = [chunk["choices"][0]["finish_reason"] for chunk in chunks]
    assert deltas[0] == {"role": "assistant", "content": "", "refusal": None}
    assert finishes[-1] == "tool_calls"
    assert set(finishes[:-1]) == {None}
    assert "".join(delta.get("content", "") for delta in deltas) == whole["content"]
    parts = [part for delta in deltas for part in delta.get("tool_calls", ())]
    for index, call in enumerate(whole["tool_calls"]):
        first, *rest = [part for part in parts if part["index"] == index]
        assert set(first) == {"index", "id", "type", "function"}
        assert first["function"] == {"name": call["function"]["name"], "arguments": ""}
        assert all(set(part) == {"index", "function"} for part in rest)
        assert all(set(part["function"]) == {"arguments"} for part in rest)
        arguments = [part["function"]["arguments"] for part in rest]
        assert "".join(arguments) == call["function"]["arguments"]
    assert len([part for part in parts if part["index"] == 0]) > 3
    assert len({part["id"] for part in parts if "id" in part}) == 2


async def test_content_of_an_answer_without_calls() -> None:
    front = front_saying("No <tool_call> here. ")
    body = (await post(front, CHAT, {**HELLO, **TOOLS})).json()
    (choice,) = body["choices"]
    assert choice["message"] == {
        "role": "assistant",
        "content": front.dispatcher.text,
        "refusal": None,
    }
    assert choice["finish_reason"] == "stop"
    chunks = await stream(front, {**HELLO, **TOOLS})
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert text == front.dispatcher.text
    assert chunks[-1]["choices"][0]["finish_reason"] == "stop"


async def test_a_call_that_is_cut_short() -> None:
    front = front_saying(TWO_CALLS)
    most = len(front.tokenizer.encode(TWO_CALLS.partition("Köln")[0]))
    body = (await post(front, CHAT, {**HELLO, **TOOLS, "max_tokens": most})).json()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"] == '{"city": "'
    chunks = await stream(front, {**HELLO, **TOOLS, "max_tokens": most})
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


async def test_calls_of_unknown_tools_are_content() -> None:
    text = '<tool_call>{"name": "rm", "arguments": {}}</tool_call>'
    body = (await post(front_saying(text), CHAT, {**HELLO, **TOOLS})).json()
    assert body["choices"][0]["message"]["content"] == text


async def test_one_call_where_only_one_is_wanted() -> None:
    front = front_saying(TWO_CALLS)
    asked = {**HELLO, **TOOLS, "parallel_tool_calls": False}
    message = (await post(front, CHAT, asked)).json()["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]
    chunks = await stream(front, asked)
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    assert {part["index"] for d in deltas for part in d.get("tool_calls", ())} == {0}


async def test_the_prompt_has_no_tools_if_none_may_be_called() -> None:
    front = front_saying(TWO_CALLS)
    body = (await post(front, CHAT, {**HELLO, **TOOLS, "tool_choice": "none"})).json()
    assert body["choices"][0]["message"]["content"] == TWO_CALLS
    assert "Tells it." not in prompt_of(front)


@pytest.mark.parametrize(
    ("choice", "single", "names"),
    [
        ("required", False, {"weather", "clock"}),
        ({"type": "function", "function": {"name": "clock"}}, True, {"clock"}),
        (
            {
                "type": "allowed_tools",
                "allowed_tools": {
                    "mode": "required",
                    "tools": [{"type": "function", "function": {"name": "weather"}}],
                },
            },
            False,
            {"weather"},
        ),
    ],
)
async def test_calls_that_must_be(choice: Any, single: bool, names: set[str]) -> None:
    front = front_saying(TWO_CALLS)
    asked = {**HELLO, **TOOLS, "tool_choice": choice}
    assert (await post(front, CHAT, asked)).status_code == 200
    grammar = front.dispatcher.requests[0].sampling.grammar
    assert grammar is not None
    assert grammar.kind is GrammarKind.LARK
    assert ("call)*" not in grammar.text) == single
    assert {name for name in ("weather", "clock") if f'\\"{name}\\"' in grammar.text} == names
    # The prompt has all of them, whichever may be called.
    assert "Tells it." in prompt_of(front)


async def test_auto_is_free() -> None:
    front = front_saying("Hello")
    await post(front, CHAT, {**HELLO, **TOOLS, "tool_choice": "auto"})
    assert front.dispatcher.requests[0].sampling.grammar is None


async def test_strict_functions_are_bound() -> None:
    front = front_saying("Hello")
    strict = {"type": "function", "function": {**WEATHER["function"], "strict": True}}
    await post(front, CHAT, {**HELLO, "tools": [strict, CLOCK]})
    grammar = front.dispatcher.requests[0].sampling.grammar
    assert grammar is not None
    assert "TEXT?" in grammar.text
    assert grammar.text.count('"lenient": true') == 1


async def test_schemas_that_cannot_be_kept() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "string", "format": "odd"}}}
    function = {"name": "f", "parameters": parameters, "strict": True}
    asked = {**HELLO, "tools": [{"type": "function", "function": function}]}
    for choice in ("auto", "required"):
        front = front_saying("Hello")
        error = check_error(await post(front, CHAT, {**asked, "tool_choice": choice}), 400, "tools")
        assert "odd" in error["message"]
        assert not front.dispatcher.requests


HISTORY: list[dict[str, Any]] = [
    {"role": "user", "content": "Weather?"},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {
                "id": "call_1",
                "type": "function",
                "function": {"name": "weather", "arguments": '{"city":"Köln"}'},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
]


@pytest.mark.parametrize("tools", [{}, TOOLS])
async def test_earlier_calls(tools: dict[str, Any]) -> None:
    front = front_saying("It rains.")
    response = await post(front, CHAT, {"model": "tiny", "messages": HISTORY, **tools})
    assert response.json()["choices"][0]["message"]["content"] == "It rains."
    prompt = prompt_of(front)
    assert '{"name": "weather", "arguments": {"city": "Köln"}}' in prompt
    assert "<tool_response>\nrain\n</tool_response>" in prompt


async def test_a_template_that_knows_tools() -> None:
    template = (
        "{% for t in tools or [] %}[{{ t.function.name }}]{% endfor %}{% for m in messages %}"
        "{{ m.role }}:{{ m.content }}{{ (m.tool_calls or []) | length }};{% endfor %}"
    )
    front = front_saying("x", template=template)
    await post(front, CHAT, {"model": "tiny", "messages": HISTORY[:2], **TOOLS})
    assert prompt_of(front) == "[weather][clock]user:Weather?0;assistant:1;"


async def test_markers_that_are_special_tokens() -> None:
    backend = tokenizers.Tokenizer.from_str(tiny_backend().to_str())
    backend.add_special_tokens(["[TOOL_CALLS]"])
    front = front_saying('See: [TOOL_CALLS][{"name": "clock", "arguments": {}}]')
    eos = sorted(front.tokenizer.eos_ids)
    template = ChatTemplate(TEMPLATE + "{# [TOOL_CALLS] #}", {})
    front.tokenizer = Tokenizer(backend, eos_ids=eos, chat_template=template)
    front.dispatcher.tokenizer = front.tokenizer
    (choice,) = (await post(front, CHAT, {**HELLO, **TOOLS})).json()["choices"]
    assert choice["message"]["content"] == "See:"
    (call,) = choice["message"]["tool_calls"]
    assert call["function"]["name"] == "clock"
    assert len(call["id"]) == 9
    chunks = await stream(front, {**HELLO, **TOOLS})
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    # A request without tools sees no marker.
    (plain,) = (await post(front, CHAT, HELLO)).json()["choices"]
    assert plain["message"]["content"] == 'See: [{"name": "clock", "arguments": {}}]'


def asking(**fields: Any) -> dict[str, Any]:
    return {**HELLO, **TOOLS, **fields}


BAD: list[tuple[dict[str, Any], str]] = [
    (asking(tools=5), "tools"),
    (asking(tools=[5]), "tools[0]"),
    (asking(tools=[{"type": "function"}]), "tools[0].function"),
    (asking(tools=[{"type": "custom", "custom": {}}]), "tools[0].custom.name"),
    (asking(tools=[{"type": "function", "function": {}}]), "tools[0].function.name"),
    (
        asking(tools=[{"type": "function", "function": {"name": "a b"}}]),
        "tools[0].function.name",
    ),
    (
        asking(tools=[{"type": "function", "function": {"name": "a" * 65}}]),
        "tools[0].function.name",
    ),
    (
        asking(tools=[{"type": "function", "function": {"name": "a", "parameters": []}}]),
        "tools[0].function.parameters",
    ),
    (
        asking(
            tools=[
                {"type": "function", "function": {"name": "a", "parameters": {"type": "string"}}}
            ]
        ),
        "tools[0].function",
    ),
    (asking(tools=[WEATHER, WEATHER]), "tools"),
    (
        asking(tools=[{"type": "function", "function": {"name": f"f{i}"}} for i in range(129)]),
        "tools",
    ),
    (
        asking(
            tools=[{"type": "function", "function": {"name": "f", "description": "x" * (1 << 19)}}]
        ),
        "tools",
    ),
    (asking(tool_choice="some"), "tool_choice"),
    (asking(tool_choice=5), "tool_choice"),
    (asking(tool_choice={"type": "function", "function": {"name": "other"}}), "tool_choice"),
    (asking(tool_choice={"type": "function"}), "tool_choice"),
    (asking(tool_choice={"type": "custom", "custom": {"name": "x"}}), "tool_choice"),
    (asking(tool_choice={"type": "allowed_tools", "allowed_tools": {"mode": "x"}}), "tool_choice"),
    ({**HELLO, "tool_choice": "required"}, "tool_choice"),
    (asking(parallel_tool_calls="no"), "parallel_tool_calls"),
    ({**HELLO, "messages": [{"role": "user", "content": None}]}, "messages[0].content"),
    (
        {**HELLO, "messages": [{**HISTORY[1], "role": "user"}]},
        "messages[0].tool_calls",
    ),
    (
        {**HELLO, "messages": [{**HISTORY[1], "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
    ),
    ({**HELLO, "functions": [{"name": "f"}]}, "functions"),
]


@pytest.mark.parametrize(("body", "param"), BAD)
async def test_bad_requests(body: dict[str, Any], param: str) -> None:
    front = make_front()
    error = check_error(await post(front, CHAT, body), 400, param)
    assert len(error["message"]) < 300
    assert not front.dispatcher.requests


@pytest.mark.parametrize(
    "choice",
    [
        {"type": "function", "function": {"name": "other"}},
        {
            "type": "allowed_tools",
            "allowed_tools": {
                "mode": "auto",
                "tools": [{"type": "function", "function": {"name": "other"}}],
            },
        },
    ],
)
async def test_the_error_names_the_unknown_tool(choice: dict[str, Any]) -> None:
    response = await post(make_front(), CHAT, asking(tool_choice=choice))
    error = check_error(response, 400, "tool_choice")
    assert error["message"] == 'tool_choice names "other", which is not among the tools'


def _with_the_client(address: str) -> tuple[Any, Any]:
    with openai.OpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {**HELLO, **TOOLS}
        whole = client.chat.completions.create(**asked)
        with client.chat.completions.stream(**asked) as events:
            streamed = events.get_final_completion()
        return whole.choices[0].message, streamed.choices[0].message


async def test_the_official_client() -> None:
    front = front_saying(TWO_CALLS)
    async with serve(front.app()) as address:
        whole, streamed = await asyncio.to_thread(_with_the_client, address)
    for message in (whole, streamed):
        assert message.content == "Let me see."
        assert [call.function.name for call in message.tool_calls] == ["weather", "clock"]
        assert json.loads(message.tool_calls[0].function.arguments) == {"city": "Köln"}


async def test_the_schema_of_the_api_knows_tools() -> None:
    front = make_front()
    async with serve(front.app()) as address, plain_client() as client:
        schema = (await client.get(f"http://{address}/openapi.json")).json()
    body = schema["components"]["schemas"]["ChatCompletionRequest"]
    assert {"tools", "tool_choice", "parallel_tool_calls"} <= set(body["properties"])
    assert "FunctionDefinition" in schema["components"]["schemas"]


PATCH = {"type": "custom", "custom": {"name": "patch", "description": "Edits files."}}
PATCHED = '<tool_call>\n{"name": "patch", "arguments": {"input": "a\\nb"}}\n</tool_call>'


async def test_a_custom_tool_is_called_with_text() -> None:
    front = front_saying(PATCHED)
    asked = {**HELLO, "tools": [WEATHER, PATCH, {"type": "web_search"}]}
    body = (await post(front, CHAT, asked)).json()
    check_schema(body, "CreateChatCompletionResponse")
    (call,) = body["choices"][0]["message"]["tool_calls"]
    assert (call["type"], call["custom"]) == ("custom", {"name": "patch", "input": "a\nb"})
    assert "Edits files." in prompt_of(front)
    response = await post(front_saying(PATCHED), CHAT, {**asked, "stream": True})
    deltas = [json.loads(one)["choices"][0]["delta"] for one in sse_payloads(response.text)[:-1]]
    told = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert told == [
        [{"index": 0, "id": told[0][0]["id"], "type": "custom", "custom": call["custom"]}]
    ]


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "custom", "custom": {"name": "patch"}}, "patch"),
        ("required", "patch"),
    ],
)
async def test_a_custom_tool_may_be_required(choice: Any, names: str) -> None:
    front = front_saying(PATCHED)
    response = await post(front, CHAT, {**HELLO, "tools": [PATCH], "tool_choice": choice})
    assert response.json()["choices"][0]["message"]["tool_calls"][0]["custom"]["name"] == names
    (request,) = front.dispatcher.requests
    assert request.sampling.grammar is not None
