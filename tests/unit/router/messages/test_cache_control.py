"""``cache_control``: how much of a prompt is kept, for how long, and what the usage says of it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from baton.request import FinishReason, Retention
from router.core.request import GenerationRequest, OutputDelta
from router.messages.cache_control import written_by_ttl
from tests.support.router.front_fakes import Front, make_front
from tests.support.router.http_app import post

PATH = "/v1/messages"
FIVE_MINUTES, HOUR = {"type": "ephemeral"}, {"type": "ephemeral", "ttl": "1h"}


def text(words: str, control: object = None) -> dict[str, Any]:
    block: dict[str, Any] = {"type": "text", "text": words}
    return block if control is None else {**block, "cache_control": control}


def body_of(*blocks: dict[str, Any], **more: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": list(blocks)}]
    return {"model": "tiny", "max_tokens": 4, "messages": messages, **more}


def spoken(front: Front, tokens: int) -> str:
    """The text of leading tokens of the prompt."""
    (request,) = front.dispatcher.requests
    ids = request.prompt_ids[:tokens]
    return front.tokenizer.decode(ids, skip_special_tokens=False)


async def kept(body: dict[str, Any]) -> tuple[Front, tuple[Retention, ...]]:
    front = make_front(context=4096)
    response = await post(front, PATH, body)
    assert response.status_code == 200, response.text
    (request,) = front.dispatcher.requests
    return front, request.retentions


async def test_without_it_nothing_is_kept() -> None:
    _, retentions = await kept(body_of(text("the fox")))
    assert retentions == ()


@pytest.mark.parametrize(
    "body",
    [
        body_of(text("the fox"), text("the dog", FIVE_MINUTES)),
        body_of(text("the fox"), cache_control=FIVE_MINUTES),
    ],
)
async def test_at_the_last_block_all_of_the_prompt_is_kept(body: dict[str, Any]) -> None:
    front, (retention,) = await kept(body)
    (request,) = front.dispatcher.requests
    assert (retention.tokens, retention.ttl_s) == (len(request.prompt_ids), 300.0)
    assert not retention.name
    assert not retention.required


@pytest.mark.parametrize(
    ("body", "end"),
    [
        (body_of(text("the lazy dog", HOUR), text("over Paris")), "the lazy dog"),
        (
            body_of(text("over Paris"), system=[text("the lazy dog", HOUR), text("the fox")]),
            "system\nthe lazy dog",
        ),
    ],
)
async def test_within_a_prompt_all_up_to_the_block_is_kept(body: dict[str, Any], end: str) -> None:
    front, (retention,) = await kept(body)
    assert retention.ttl_s == 3600.0
    assert spoken(front, retention.tokens).rstrip("\n").endswith(end)


async def test_a_breakpoint_in_an_earlier_turn() -> None:
    messages = [
        {"role": "user", "content": [text("the lazy dog")]},
        {"role": "assistant", "content": [text("the quick fox", HOUR)]},
        {"role": "user", "content": [text("over Paris", FIVE_MINUTES)]},
    ]
    front, (long, short) = await kept(body_of(messages=messages))
    (request,) = front.dispatcher.requests
    assert (long.ttl_s, short.ttl_s) == (3600.0, 300.0)
    assert short.tokens == len(request.prompt_ids)
    before = spoken(front, long.tokens)
    assert "the quick fox<|im_end|>" in before
    assert "over Paris" not in before


async def test_tools_are_kept_with_what_the_template_puts_before_the_first_message() -> None:
    tool = {"name": "weather", "input_schema": {"type": "object"}, "cache_control": HOUR}
    front, (retention,) = await kept(body_of(text("over Paris"), tools=[tool]))
    before = spoken(front, retention.tokens)
    assert "weather" in before
    assert "over Paris" not in before


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (body_of(*[text("a", FIVE_MINUTES)] * 5), "messages[0].content[4]"),
        (body_of(text("a", FIVE_MINUTES), text("b", HOUR)), "messages[0].content[1]"),
        (body_of(text("a", {"type": "lasting"})), "messages[0].content[0].cache_control"),
        (body_of(text("a", "ephemeral")), "messages[0].content[0].cache_control"),
        (
            body_of(text("a", {"type": "ephemeral", "ttl": "2h"})),
            "messages[0].content[0].cache_control.ttl",
        ),
        (body_of(text("a"), cache_control=[]), "cache_control must be an object"),
    ],
)
async def test_what_is_wrong_with_it_is_named(body: dict[str, Any], param: str) -> None:
    front = make_front(context=4096)
    response = await post(front, PATH, body)
    assert response.status_code == 400, response.text
    message = response.json()["error"]["message"]
    assert param in message
    assert "the request.cache_control" not in message
    assert not front.dispatcher.requests


async def reading_and_writing(request: GenerationRequest) -> AsyncIterator[OutputDelta]:
    yield OutputDelta("x", (65,), None, cached_prompt_tokens=4, written_prompt_tokens=8)
    yield OutputDelta("y", (66,), FinishReason.STOP)


async def test_usage_counts_what_was_read_and_written_apart() -> None:
    front = make_front(reading_and_writing, context=4096)
    body = body_of(text("the quick brown fox jumps over the lazy dog", HOUR))
    usage = (await post(front, PATH, body)).json()["usage"]
    (request,) = front.dispatcher.requests
    assert usage == {
        "input_tokens": len(request.prompt_ids) - 12,
        "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 8,
        "cache_creation": {"ephemeral_5m_input_tokens": 0, "ephemeral_1h_input_tokens": 8},
        "output_tokens": 2,
    }


def test_written_tokens_are_counted_by_the_time_that_they_are_kept() -> None:
    retentions = (Retention(20, 3600.0), Retention(50, 300.0))
    for cached, written, five_minutes, hour in (
        (0, 48, 28, 20),
        (16, 32, 28, 4),
        (32, 16, 16, 0),
        (0, 16, 0, 16),
    ):
        assert written_by_ttl(retentions, cached, written) == {
            "ephemeral_5m_input_tokens": five_minutes,
            "ephemeral_1h_input_tokens": hour,
        }
