"""Whatever a server may have answered can be sent back to any API; what the model sees of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.errors import InvalidRequest, UnsupportedParameter
from router.conversation.turns import Turn
from router.messages.blocks import message_turns
from router.messages.protocol import MessagesRequest
from router.openai.history import openai_turns
from router.openai.protocol import ChatCompletionRequest
from router.responses.items import response_turns

USER: dict[str, Any] = {"role": "user", "content": "Go"}
IMAGE = {"type": "image", "source": {"type": "base64", "data": "x"}}
FUNCTION = {"name": "f", "arguments": '{"a": '}


def chat(*messages: dict[str, Any]) -> list[Turn]:
    body = ChatCompletionRequest.model_validate({"model": "m", "messages": list(messages)})
    return openai_turns(body.messages)


def messages(*given: dict[str, Any]) -> list[Turn]:
    body = MessagesRequest.model_validate({"model": "m", "max_tokens": 5, "messages": list(given)})
    return message_turns(body)


def items(*given: dict[str, Any]) -> list[Turn]:
    return response_turns(given, None)


def call_of(turn: Turn) -> tuple[str, str, str]:
    (call,) = turn["tool_calls"]
    return call["id"], call["function"]["name"], call["function"]["arguments"]


@pytest.mark.parametrize(
    ("answer", "text"),
    [
        ({"content": None}, ""),
        ({"content": ""}, ""),
        ({"content": []}, ""),
        ({}, ""),
        ({"content": None, "refusal": "I cannot."}, "I cannot."),
        ({"content": [{"type": "refusal", "refusal": "I cannot."}]}, "I cannot."),
        ({"content": [{"type": "output_text", "text": "Yes."}]}, "Yes."),
        ({"content": None, "audio": {"id": "a", "transcript": "Yes."}}, "Yes."),
        ({"content": None, "tool_calls": []}, ""),
        ({"content": [{"type": "image_url", "image_url": {}}]}, "[image_url: not shown]"),
        ({"content": "Yes.", "annotations": [], "audio": None, "id": "x"}, "Yes."),
    ],
)
def test_a_chat_s_answer_goes_back(answer: dict[str, Any], text: str) -> None:
    _, turn, _ = chat(USER, {"role": "assistant", **answer}, USER)
    assert turn == {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "answer",
    [
        {"reasoning_content": "hm"},
        {"reasoning": "hm"},
        {"reasoning_details": [{"type": "reasoning.text", "text": "hm"}]},
        {"thinking_blocks": [{"type": "thinking", "thinking": "hm", "signature": ""}]},
        {"content": [{"type": "thinking", "thinking": "hm"}]},
    ],
)
def test_a_chat_s_reasoning_goes_back_under_any_name(answer: dict[str, Any]) -> None:
    _, turn, _ = chat(USER, {"role": "assistant", "content": None, **answer}, USER)
    assert (turn["content"], turn["reasoning_content"]) == ("", "hm")


@pytest.mark.parametrize(
    ("call", "found"),
    [
        ({"id": "1", "type": "function", "function": FUNCTION}, ("1", "f", '{"a": ')),
        ({"id": "1", "function": {**FUNCTION, "arguments": {"a": "ü"}}}, ("1", "f", '{"a": "ü"}')),
        ({"id": "1", "function": {"name": "f"}}, ("1", "f", "{}")),
        ({"function": {"name": "a.b/c", "arguments": ""}}, ("call_1_0", "a.b/c", "")),
        ({"id": None, "function": FUNCTION}, ("call_1_0", "f", '{"a": ')),
        (
            {"id": "1", "type": "custom", "custom": {"name": "f", "input": "x"}},
            ("1", "f", '{"input": "x"}'),
        ),
    ],
)
def test_a_chat_s_calls_go_back(call: dict[str, Any], found: tuple[str, str, str]) -> None:
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    _, turn, result = chat(USER, said, {"role": "tool", "tool_call_id": "1", "content": None})
    assert call_of(turn) == found
    assert result == {"role": "tool", "content": "", "tool_call_id": "1"}


def test_results_without_an_id_find_their_calls() -> None:
    calls = [{"id": str(n), "function": {"name": name}} for n, name in enumerate("ab")]
    said = {"role": "assistant", "tool_calls": calls}
    *_, first, second = chat(
        said,
        {"role": "function", "name": "b", "content": "B"},
        {"role": "tool", "content": [{"type": "text", "text": "A"}]},
    )
    assert (first["tool_call_id"], second["tool_call_id"]) == ("1", "0")
    old = {"role": "assistant", "content": None, "function_call": FUNCTION}
    turn, result = chat(old, {"role": "function", "name": "f", "content": "x"})
    assert result["tool_call_id"] == call_of(turn)[0]


def test_names_and_roles_reach_the_template() -> None:
    assert chat({**USER, "name": "alice"}) == [{"role": "user", "content": "Go", "name": "alice"}]
    assert [turn["role"] for turn in chat({**USER, "role": "developer"}, USER)] == [
        "system",
        "user",
    ]
    assert chat({**USER, "role": "ipython"})[0]["role"] == "ipython"


@pytest.mark.parametrize(
    ("block", "text"),
    [
        ({"type": "text", "text": "Yes."}, "Yes."),
        ({"type": "thinking", "thinking": "hm", "signature": ""}, ""),
        ({"type": "redacted_thinking", "data": "x"}, ""),
        ({"type": "compaction", "content": "so far"}, "so far"),
        ({"type": "server_tool_use", "id": "1", "name": "web_search", "input": {}}, ""),
        ({"type": "container_upload", "file_id": "x"}, ""),
        ({"type": "a_new_block", "x": 1}, "[a_new_block: not shown]"),
    ],
)
def test_an_assistant_s_block_goes_back(block: dict[str, Any], text: str) -> None:
    turns = messages(USER, {"role": "assistant", "content": [block]}, USER)
    assert [turn["content"] for turn in turns] == ["Go", text, "Go"]


@pytest.mark.parametrize("content", [None, [], ""])
def test_an_assistant_may_have_said_nothing(content: Any) -> None:
    assert messages(USER, {"role": "assistant", "content": content}, USER)[1] == {
        "role": "assistant",
        "content": "",
    }


def test_a_server_tool_s_result_is_a_message_of_its_own() -> None:
    found = [{"type": "web_search_result", "title": "T", "url": "u", "encrypted_content": "x"}]
    blocks = [
        {"type": "text", "text": "I look."},
        {"type": "server_tool_use", "id": "1", "name": "web_search", "input": {"query": "q"}},
        {"type": "web_search_tool_result", "tool_use_id": "1", "content": found},
        {"type": "text", "text": "It is T."},
    ]
    _, call, result, answer, _ = messages(USER, {"role": "assistant", "content": blocks}, USER)
    assert (call["content"], call_of(call)) == ("I look.", ("1", "web_search", '{"query": "q"}'))
    assert json.loads(result["content"]) == found
    assert answer["content"] == "It is T."


def test_a_system_message_may_stand_among_others() -> None:
    said = {"role": "system", "content": [{"type": "text", "text": "Be short."}]}
    assert [turn["role"] for turn in messages(USER, said, USER)] == ["user", "system", "user"]


@pytest.mark.parametrize(
    "content",
    [[IMAGE], [{"type": "tool_result", "tool_use_id": "1", "content": [IMAGE]}]],
)
def test_an_image_is_refused_in_the_current_turn_alone(content: list[dict[str, Any]]) -> None:
    shown = {"role": "user", "content": content}
    with pytest.raises(UnsupportedParameter, match="image"):
        messages(shown)
    turns = messages(shown, {"role": "assistant", "content": "I see."}, USER)
    assert turns[0]["content"] == "[image: not shown]"


def test_documents_and_search_results_are_text() -> None:
    blocks = [
        {"type": "document", "source": {"type": "text", "data": "words"}},
        {"type": "search_result", "title": "T", "content": [{"type": "text", "text": "found"}]},
    ]
    assert messages({"role": "user", "content": blocks})[0]["content"] == "words\nT\nfound"


SHELL = {"type": "local_shell_call", "call_id": "1", "action": {"type": "exec", "command": ["ls"]}}


def test_hosted_calls_go_back_with_their_outputs_and_are_left_out_without() -> None:
    output = {"type": "local_shell_call_output", "id": "1", "output": "a b"}
    _, call, result, _ = items(USER, SHELL, output, USER)
    assert call_of(call) == ("1", "local_shell", json.dumps(SHELL["action"]))
    assert result == {"role": "tool", "content": "a b", "tool_call_id": "1"}
    assert [turn["role"] for turn in items(USER, SHELL, USER)] == ["user", "user"]
    search = {"type": "web_search_call", "id": "ws", "action": {"query": "q"}}
    assert [turn["role"] for turn in items(USER, search, USER)] == ["user", "user"]
    mcp = {"type": "mcp_call", "id": "m", "name": "s.look", "arguments": "{}", "output": "found"}
    _, call, result, _ = items(USER, mcp, USER)
    assert (call_of(call), result["content"]) == (("m", "s.look", "{}"), "found")


@pytest.mark.parametrize(
    "item",
    [
        {"type": "mcp_list_tools", "id": "x", "tools": []},
        {"type": "compaction", "encrypted_content": "x"},
        {"type": "additional_tools", "role": "developer", "tools": []},
        {"type": "reasoning", "id": "x", "summary": [], "encrypted_content": "x"},
        {"type": "image_generation_call", "id": "x", "status": "completed"},
    ],
)
def test_items_that_say_nothing_are_left_out(item: dict[str, Any]) -> None:
    assert items(item, USER) == [{"role": "user", "content": "Go"}]


def test_items_of_custom_tools_go_back() -> None:
    call = {"type": "custom_tool_call", "call_id": "1", "name": "patch", "input": "x\ny"}
    output = {"type": "custom_tool_call_output", "call_id": "1", "output": "done"}
    _, said, result = items(USER, call, output)
    assert call_of(said) == ("1", "patch", '{"input": "x\\ny"}')
    assert result["content"] == "done"


def test_reasoning_goes_back_with_its_answer() -> None:
    summary = {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}]}
    said = {"role": "assistant", "content": [{"type": "refusal", "refusal": "no"}]}
    assert items(USER, summary, said, USER)[1] == {
        "role": "assistant",
        "content": "no",
        "reasoning_content": "hm",
    }


def test_an_unknown_item_is_refused_in_the_current_turn_alone() -> None:
    unknown = {"type": "a_new_item", "x": 1}
    with pytest.raises(UnsupportedParameter, match="a_new_item"):
        items(USER, unknown)
    turns = items(unknown, {"role": "assistant", "content": "Hi"}, USER)
    assert [turn["role"] for turn in turns] == ["assistant", "user"]


@pytest.mark.parametrize(
    "given",
    [
        {"role": "user", "content": 5},
        {"role": "user", "content": [{"type": "input_text"}]},
        {"type": "function_call", "call_id": "1", "name": "", "arguments": "{}"},
        {"type": "function_call_output", "output": "x"},
    ],
)
def test_what_is_malformed_is_refused(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest):
        items(given, USER)
