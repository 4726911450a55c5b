"""``/v1/messages`` of a model that reasons: blocks of thinking, asked for and given back."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.support.router.front_fakes import Front
from tests.support.router.http_app import post
from tests.support.router.reasoning import REASONED, reasoning_front

PATH = "/v1/messages"
HELLO: dict[str, Any] = {
    "model": "tiny",
    "max_tokens": 1000,
    "messages": [{"role": "user", "content": "Hello"}],
}
THINKING = {"type": "thinking", "thinking": "Let me think.", "signature": ""}


async def whole(front: Front, body: dict[str, Any]) -> dict[str, Any]:
    response = await post(front, PATH, body)
    assert response.status_code == 200, response.text
    value: dict[str, Any] = response.json()
    return value


def prompt_of(front: Front) -> str:
    request = front.dispatcher.requests[-1]
    return front.tokenizer.decode(request.prompt_ids, skip_special_tokens=False)


async def test_thinking_is_a_block_before_the_text() -> None:
    """Its signature is empty: nothing vouches for it."""
    body = await whole(reasoning_front(), HELLO)
    assert body["content"] == [THINKING, {"type": "text", "text": "Paris."}]


async def test_events_of_thinking() -> None:
    response = await post(reasoning_front(), PATH, {**HELLO, "stream": True})
    events = [
        json.loads(block.partition("data: ")[2])
        for block in response.text.removesuffix("\n\n").split("\n\n")
    ]
    starts = [event for event in events if event["type"] == "content_block_start"]
    assert [event["content_block"] for event in starts] == [
        {"type": "thinking", "thinking": "", "signature": ""},
        {"type": "text", "text": ""},
    ]
    deltas = [event["delta"] for event in events if event["type"] == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"thinking_delta", "text_delta"}
    assert "".join(delta.get("thinking", "") for delta in deltas) == "Let me think."
    assert "".join(delta.get("text", "") for delta in deltas) == "Paris."


@pytest.mark.parametrize(
    ("thinking", "budget", "begins_closed"),
    [
        ({"type": "enabled", "budget_tokens": 100}, 100, False),
        ({"type": "enabled"}, None, False),
        ({"type": "adaptive"}, None, False),
        ({"type": "disabled"}, None, True),
    ],
)
async def test_what_is_asked_of_thinking(
    thinking: dict[str, Any], budget: int | None, begins_closed: bool
) -> None:
    front = reasoning_front()
    await whole(front, {**HELLO, "thinking": thinking})
    span = front.dispatcher.requests[-1].reasoning_span
    assert (span and span.budget) == budget
    assert prompt_of(front).endswith("</think>\n\n") is begins_closed


async def test_thinking_of_earlier_answers_goes_to_the_template() -> None:
    front = reasoning_front()
    blocks = [
        {"type": "thinking", "thinking": "Easy.", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "text", "text": "Rome."},
    ]
    messages = [
        *HELLO["messages"],
        {"role": "assistant", "content": blocks},
        *HELLO["messages"],
    ]
    await whole(front, {**HELLO, "messages": messages})
    assert "assistant\n<think>Easy.</think>Rome.<|im_end|>" in prompt_of(front)


async def test_an_answer_that_the_client_has_begun_goes_on() -> None:
    front = reasoning_front(text="is.")
    begun = {"role": "assistant", "content": "Par"}
    asked = {**HELLO, "messages": [*HELLO["messages"], begun]}
    body = await whole(front, asked)
    assert prompt_of(front).endswith("assistant\nPar")
    assert body["content"] == [{"type": "text", "text": "is."}]
    counted = (await post(front, f"{PATH}/count_tokens", asked)).json()
    assert counted["input_tokens"] == len(front.dispatcher.requests[-1].prompt_ids)


async def test_a_prompts_tokens_are_counted_as_they_are_computed() -> None:
    front = reasoning_front(text=REASONED)
    for thinking in ({"type": "disabled"}, {"type": "enabled"}):
        asked = {**HELLO, "thinking": thinking}
        await whole(front, asked)
        counted = (await post(front, f"{PATH}/count_tokens", asked)).json()
        assert counted["input_tokens"] == len(front.dispatcher.requests[-1].prompt_ids)
