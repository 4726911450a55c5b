"""Bodies: what is counted before it is parsed, and who reads how much at a time."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

import pytest
from starlette.requests import Request
from starlette.types import Message

from baton.errors import InvalidRequest, Overloaded, RequestTooLarge
from baton.host.turns import FairTurns
from router.http import client
from router.http.client import (
    LARGE_AT_ONCE,
    LARGE_BYTES,
    MAX_CONTAINERS,
    SMALL_BYTES,
    BodyReader,
    ValueCount,
)

LIMIT = 1 << 20
STRINGS = ("", "a", '"', "\\", '\\"', "\\\\", ",[{", 'x\\",[', "é😀", "\n")


class Counts(ValueCount):
    """Tells what was counted."""

    @property
    def found(self) -> tuple[int, ...]:
        return tuple(int(number) for number in self._found)


def random_value(dice: random.Random, depth: int = 0) -> Any:
    kind = dice.randrange(6 if depth < 5 else 4)
    if kind == 4:
        return [random_value(dice, depth + 1) for _ in range(dice.randrange(5))]
    if kind == 5:
        names = dice.sample(STRINGS, dice.randrange(5))
        return {name: random_value(dice, depth + 1) for name in names}
    return (dice.choice(STRINGS), dice.choice(STRINGS), dice.random(), None)[kind]


def counted(value: Any) -> tuple[int, int, int]:
    """Objects and lists, strings, commas."""
    if isinstance(value, str):
        return 0, 1, 0
    if not isinstance(value, list | dict):
        return 0, 0, 0
    parts = [
        counted(one) for one in ([*value, *value.values()] if isinstance(value, dict) else value)
    ]
    containers, strings, commas = (
        (sum(column) for column in zip(*parts, strict=True)) if parts else (0, 0, 0)
    )
    return containers + 1, strings, commas + max(0, len(value) - 1)


@pytest.mark.parametrize("seed", range(50))
def test_values_are_counted_in_any_pieces(seed: int) -> None:
    dice = random.Random(seed)
    value = [random_value(dice) for _ in range(20)]
    text = json.dumps(value, ensure_ascii=dice.random() < 0.5).encode()
    counts, at = Counts(0), 0
    while at < len(text):
        size = dice.choice([1, 1, 2, 7, 100])
        counts.feed(text[at : at + size])
        at += size
    assert counts.found == counted(value)


@pytest.mark.parametrize(
    ("body", "what"),
    [
        (b"[" + b"{}," * 40_000 + b"{}]", "32768 objects and lists"),
        (b"[" + b'"",' * 70_000 + b'""]', "65536 strings"),
        (b"[" + b"0," * 400_000 + b"0]", "327680 values"),
    ],
)
def test_what_is_too_much_is_named(body: bytes, what: str) -> None:
    with pytest.raises(InvalidRequest, match=f"the body has more than {what}"):
        ValueCount(0).feed(body)


def test_text_is_not_counted() -> None:
    ValueCount(0).feed(json.dumps({"prompt": ',[{"\\' * 200_000}).encode())


class Client:
    """Sends a body in parts, and remembers how many were taken."""

    def __init__(self, parts: Sequence[bytes], *, stops: bool = False) -> None:
        self._parts = list(parts)
        self._stops = stops
        self.taken = 0

    def request(self) -> Request:
        scope = {"type": "http", "method": "POST", "headers": []}
        return Request(scope, self._receive)

    async def _receive(self) -> Message:
        if self._stops and self.taken == len(self._parts):
            await asyncio.Event().wait()
        part = self._parts[self.taken]
        self.taken += 1
        more = self._stops or self.taken < len(self._parts)
        return {"type": "http.request", "body": part, "more_body": more}


def parts_of(value: Any, size: int = 32 << 10) -> list[bytes]:
    raw = json.dumps(value).encode()
    return [raw[at : at + size] for at in range(0, len(raw), size)]


SMALL = {"prompt": "a" * 100}
MIDDLE = {"prompt": "a" * (SMALL_BYTES + 10)}
LARGE = {"prompt": "a" * (LARGE_BYTES + (100 << 10))}


@pytest.fixture
async def held() -> AsyncIterator[AsyncExitStack]:
    async with AsyncExitStack() as stack:
        yield stack


def reader(deadline_s: float = 60.0) -> BodyReader:
    return BodyReader(LIMIT, deadline_s, 512)


@pytest.mark.parametrize("value", [SMALL, MIDDLE, LARGE])
async def test_bodies_of_any_size(value: dict[str, Any]) -> None:
    async with reader().object(Client(parts_of(value)).request(), "a") as body:
        assert body == value


async def test_large_bodies_take_turns(held: AsyncExitStack) -> None:
    bodies = reader()
    for _ in range(LARGE_AT_ONCE - 1):
        client = Client(parts_of(LARGE))
        await held.enter_async_context(bodies.object(client.request(), "a"))
    late = Client(parts_of(LARGE))
    waiting = asyncio.create_task(held.enter_async_context(bodies.object(late.request(), "a")))
    await asyncio.sleep(0.01)
    # It is not read to its end, while another tenant's is, and smaller ones are.
    assert not waiting.done()
    assert late.taken < len(parts_of(LARGE))
    async with bodies.object(Client(parts_of(LARGE)).request(), "b") as body:
        assert body == LARGE
    async with bodies.object(Client(parts_of(MIDDLE)).request(), "a") as body:
        assert body == MIDDLE
    waiting.cancel()


async def test_a_large_body_that_stops_gives_its_turn_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client, "LARGE_BODY_S", 0.05)
    bodies = reader()
    some = parts_of(LARGE)[:-1]
    for _ in range(LARGE_AT_ONCE):
        with pytest.raises(InvalidRequest, match="did not arrive in time"):
            async with bodies.object(Client(some, stops=True).request(), "a"):
                pass


async def test_values_are_refused_before_the_body_is_there() -> None:
    parts = parts_of({"x": [{}] * (4 * MAX_CONTAINERS)})
    sender = Client(parts)
    with pytest.raises(InvalidRequest, match="more than 32768 objects and lists"):
        async with reader().object(sender.request(), "a"):
            pass
    assert sender.taken < len(parts) * 2 / 3


async def test_too_many_bytes() -> None:
    sender = Client(parts_of({"prompt": "a" * 2 * LIMIT}))
    with pytest.raises(RequestTooLarge, match=f"larger than {LIMIT} bytes"):
        async with reader().object(sender.request(), "a"):
            pass


async def test_a_tenant_with_too_many_large_bodies_gets_a_retry_after(
    monkeypatch: pytest.MonkeyPatch, held: AsyncExitStack
) -> None:
    monkeypatch.setattr(client, "LARGE_AT_ONCE", 2)
    monkeypatch.setattr(client, "FairTurns", partial(FairTurns, max_waiting=0))
    bodies = BodyReader(LIMIT, 60.0, 512)
    await held.enter_async_context(bodies.object(Client(parts_of(LARGE)).request(), "a"))
    with pytest.raises(Overloaded, match="of this tenant are already waiting") as found:
        async with bodies.object(Client(parts_of(LARGE)).request(), "a"):
            pass
    assert found.value.retry_after == 1.0
