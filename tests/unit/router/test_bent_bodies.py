"""Bodies that are right except in one place: whatever is there, it causes no server error."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.router.front_fakes import make_front
from tests.support.router.http_app import JSON, post

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
FUNCTION = {"name": "f", "description": "d", "parameters": SCHEMA, "strict": True}
CHAT: dict[str, Any] = {
    "model": "tiny",
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "y"},
    ],
    "tools": [{"type": "function", "function": FUNCTION}],
    "tool_choice": {
        "type": "allowed_tools",
        "allowed_tools": {
            "mode": "auto",
            "tools": [{"type": "function", "function": {"name": "f"}}],
        },
    },
    "parallel_tool_calls": True,
}
RESPONSES: dict[str, Any] = {
    "model": "tiny",
    "instructions": "x",
    "input": [
        {"type": "message", "role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "1", "output": "y"},
    ],
    "tools": [{"type": "function", **FUNCTION}],
    "tool_choice": {"type": "function", "name": "f"},
    "metadata": {"a": "b"},
    "include": ["reasoning.encrypted_content"],
    "max_output_tokens": 5,
    "store": False,
    "top_logprobs": 0,
}
FORMAT: dict[str, Any] = {
    "model": "tiny",
    "input": "x",
    "text": {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}},
}
MESSAGES: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 5,
    "system": [{"type": "text", "text": "x"}],
    "messages": [
        {"role": "user", "content": [{"type": "text", "text": "x"}]},
        {
            "role": "assistant",
            "content": [{"type": "tool_use", "id": "1", "name": "f", "input": {}}],
        },
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "1", "content": [], "is_error": False}
            ],
        },
    ],
    "tools": [{"name": "f", "description": "d", "input_schema": SCHEMA}],
    "tool_choice": {"type": "tool", "name": "f", "disable_parallel_tool_use": True},
    "stop_sequences": ["x"],
    "thinking": {"type": "disabled"},
}
BODIES = [
    ("/v1/chat/completions", CHAT),
    ("/v1/responses", RESPONSES),
    ("/v1/responses", FORMAT),
    ("/v1/messages", MESSAGES),
    ("/v1/messages/count_tokens", MESSAGES),
    ("/tokenize", {name: CHAT[name] for name in ("model", "messages", "tools")}),
    ("/detokenize", {"model": "tiny", "tokens": [5, 6]}),
]


def places(value: Any, here: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """The path of everything in a JSON value."""
    found = [here] if here else []
    if isinstance(value, dict):
        found += [place for name, inner in value.items() for place in places(inner, (*here, name))]
    elif isinstance(value, list):
        found += [place for i, inner in enumerate(value) for place in places(inner, (*here, i))]
    return found


def bent(body: dict[str, Any], place: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    """The body with another value in this place."""
    other: Any = copy.deepcopy(body)
    inside = other
    for step in place[:-1]:
        inside = inside[step]
    inside[place[-1]] = value
    assert isinstance(other, dict)
    return other


async def test_the_bodies_are_right() -> None:
    for path, body in BODIES:
        response = await post(make_front(context=4096), path, body)
        assert response.status_code == 200, response.text


@settings(max_examples=60, deadline=None)
@given(st.data())
async def test_no_place_is_the_servers_fault(data: st.DataObject) -> None:
    path, body = data.draw(st.sampled_from(BODIES))
    place = data.draw(st.sampled_from(places(body)))
    value = data.draw(JSON | st.sampled_from(["f", "function", "text", "tool", {}, []]))
    stream = data.draw(st.booleans())
    asked = {**bent(body, place, value), **({"stream": True} if stream else {})}
    response = await post(make_front(context=4096), path, asked)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        message = response.json()["error"]["message"]
        assert 0 < len(message) < 1000
