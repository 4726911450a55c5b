"""``/v1/responses`` of a model that reasons: items of reasoning, and what is asked of it."""

from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.support.router.front_fakes import Front
from tests.support.router.http_app import check_error, post
from tests.support.router.reasoning import reasoning_front

PATH = "/v1/responses"
HELLO: dict[str, Any] = {"model": "tiny", "input": "Hello"}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def whole(front: Front, body: dict[str, Any]) -> dict[str, Any]:
    response = await post(front, PATH, body)
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    Response.model_validate(value)
    return value


async def stream(front: Front, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await post(front, PATH, {**body, "stream": True})
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    events = [json.loads(block.partition("data: ")[2]) for block in blocks]
    for event in events:
        EVENT.validate_python(event)
    return events


def prompt_of(front: Front) -> str:
    request = front.dispatcher.requests[-1]
    return front.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)


async def test_reasoning_is_an_item_before_the_message() -> None:
    front = reasoning_front()
    asked = {**HELLO, "reasoning": {"effort": "high", "summary": "auto"}}
    body = await whole(front, asked)
    reasoning, message = body["output"]
    assert reasoning["type"] == "reasoning"
    assert reasoning["summary"] == []
    assert reasoning["content"] == [{"type": "reasoning_text", "text": "Let me think."}]
    assert message["content"][0]["text"] == "Paris."
    assert body["reasoning"] == {"effort": "high", "summary": None}
    assert body["usage"]["output_tokens_details"]["reasoning_tokens"] > 0


async def test_events_of_reasoning() -> None:
    front = reasoning_front()
    events = await stream(front, HELLO)
    kinds = [kind for kind, _ in itertools.groupby(event["type"] for event in events)]
    assert kinds[2:8] == [
        "response.output_item.added",
        "response.content_part.added",
        "response.reasoning_text.delta",
        "response.reasoning_text.done",
        "response.content_part.done",
        "response.output_item.done",
    ]
    told = [event for event in events if event["type"] == "response.reasoning_text.delta"]
    assert "".join(event["delta"] for event in told) == "Let me think."
    final = events[-1]["response"]
    assert [item["type"] for item in final["output"]] == ["reasoning", "message"]
    whole_output = (await whole(front, HELLO))["output"]
    for streamed, at_once in zip(final["output"], whole_output, strict=True):
        assert streamed["content"] == at_once["content"]


async def test_an_answer_that_is_cut_in_its_reasoning() -> None:
    front = reasoning_front(text="<think>Let me")
    most = len(front.tokenizer.encode("<think>Let me"))
    body = await whole(front, {**HELLO, "max_output_tokens": most})
    (item,) = body["output"]
    assert (item["type"], item["status"]) == ("reasoning", "incomplete")
    assert body["incomplete_details"] == {"reason": "max_output_tokens"}


async def test_an_effort_of_none_turns_it_off() -> None:
    front = reasoning_front(text="Paris.")
    await whole(front, {**HELLO, "reasoning": {"effort": "none"}})
    assert prompt_of(front).endswith("assistant\n<think>\n\n</think>\n\n")


async def test_items_of_reasoning_go_to_the_template_with_their_answer() -> None:
    front = reasoning_front()
    (first, message) = (await whole(front, HELLO))["output"]
    later = [
        {"role": "user", "content": "Hello"},
        first,
        message,
        # What other servers have encrypted says nothing.
        {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "x"},
        {"role": "user", "content": "Again"},
    ]
    await whole(front, {**HELLO, "input": later})
    assert "assistant\n<think>Let me think.</think>Paris.<|im_end|>" in prompt_of(front)


@pytest.mark.parametrize(
    ("asked", "param"),
    [
        ({"reasoning": {"effort": "extreme"}}, "reasoning.effort"),
        ({"reasoning": {"summary": "long"}}, "reasoning.summary"),
        ({"input": [{"type": "reasoning", "content": 5}]}, "input[0].content"),
        ({"input": [{"type": "reasoning", "content": [{}]}]}, "input[0].content[0]"),
    ],
)
async def test_what_cannot_be(asked: dict[str, Any], param: str) -> None:
    check_error(await post(reasoning_front(), PATH, {**HELLO, **asked}), 400, param)
