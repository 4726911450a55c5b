"""Long lists of an answer are made while they are sent."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from starlette.types import Message

from router.http.client import ClientGone
from router.http.json_stream import PART_CHARACTERS, Items, JsonStream, json_parts, without_items


def numbers(count: int) -> Items:
    return Items(iter(range(count)))


def nested(count: int) -> dict[str, Any]:
    choice = {"text": "é\n", "logprobs": {"tokens": numbers(count), "none": None}}
    return {"id": "x", "choices": [choice, {"text": ""}], "empty": Items([]), "usage": {"n": 1}}


@pytest.mark.parametrize("count", [0, 1, 32, 33, 1000])
def test_the_text_is_that_of_lists(count: int) -> None:
    expected = without_items(nested(count))
    assert expected["choices"][0]["logprobs"]["tokens"] == list(range(count))
    assert json.loads("".join(json_parts(nested(count)))) == expected


async def sent_by(response: JsonStream) -> list[Message]:
    found: list[Message] = []

    async def send(message: Message) -> None:
        found.append(message)

    async def receive() -> Message:
        await asyncio.Event().wait()
        raise AssertionError("unreachable")

    await response({"type": "http"}, receive, send)
    return found


async def test_a_short_answer_has_its_length() -> None:
    begin, body = await sent_by(JsonStream({"a": numbers(3)}, {"x-a": "b"}))
    assert (b"content-length", b"%d" % len(body["body"])) in begin["headers"]
    assert (b"x-a", b"b") in begin["headers"]
    assert json.loads(body["body"]) == {"a": [0, 1, 2]}
    assert not body["more_body"]


async def test_a_long_answer_comes_in_parts() -> None:
    begin, *parts = await sent_by(JsonStream(nested(100_000)))
    assert not any(name == b"content-length" for name, _ in begin["headers"])
    assert max(len(part["body"]) for part in parts) < 2 * PART_CHARACTERS
    assert [part["more_body"] for part in parts] == [True] * (len(parts) - 1) + [False]
    whole = json.loads(b"".join(part["body"] for part in parts))
    assert whole == without_items(nested(100_000))


async def test_a_client_that_leaves_ends_the_work() -> None:
    made = 0

    def items() -> Iterator[int]:
        nonlocal made
        while True:
            made += 1
            yield made

    async def receive() -> Message:
        return {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        await asyncio.sleep(0)

    with pytest.raises(ClientGone):
        await JsonStream({"a": Items(items())})({"type": "http"}, receive, send)
    assert made < 100_000
