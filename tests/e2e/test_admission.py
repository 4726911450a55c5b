"""Loads that the defaults serve without refusing anything, their short leases included."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import httpx
import pytest

from tests.support.e2e.cluster import UpProcess

_ENDS_S = 240.0
_VOCABULARY = 2000
"""Ids below this are plain tokens."""
_TOKENS = 4
"""Of each answer."""


class Clients:
    """Ask for a few tokens after random prompts, which no cache has, and count the answers."""

    def __init__(self, http: httpx.AsyncClient, model: str) -> None:
        self._http = http
        self._model = model
        self._dice = random.Random(0)
        self.statuses: Counter[int] = Counter()

    async def ask(self, prompt_tokens: int) -> None:
        body = {
            "model": self._model,
            "prompt": [self._dice.randrange(100, _VOCABULARY) for _ in range(prompt_tokens)],
            "max_tokens": _TOKENS,
            "ignore_eos": True,
        }
        answer = await self._http.post("/v1/completions", json=body)
        self.statuses[answer.status_code] += 1
        if answer.status_code == httpx.codes.OK:
            assert answer.json()["usage"]["completion_tokens"] == _TOKENS

    async def at_once(self, clients: int, prompt_tokens: int) -> None:
        await asyncio.gather(*(self.ask(prompt_tokens) for _ in range(clients)))

    async def closed_loop(self, clients: int, each: int, prompt_tokens: int) -> None:
        """Run clients that each ask again as soon as they are answered."""

        async def client() -> None:
            for _ in range(each):
                await self.ask(prompt_tokens)

        await asyncio.gather(*(client() for _ in range(clients)))


@pytest.mark.timeout(2 * _ENDS_S)
@pytest.mark.long
@pytest.mark.parametrize("share", [0.1, 1.0])
async def test_the_defaults_refuse_nothing_that_can_be_served(
    defaults: UpProcess, share: float
) -> None:
    """``share`` is that of the prompts' tokens, of all prompts but the longest."""

    def part(tokens: int) -> int:
        return int(share * tokens)

    limits = httpx.Limits(max_connections=None)
    async with (
        asyncio.timeout(_ENDS_S),
        httpx.AsyncClient(
            base_url=defaults.http, trust_env=False, timeout=_ENDS_S, limits=limits
        ) as http,
    ):
        clients = Clients(http, defaults.model)
        await clients.at_once(8, part(3000))
        # One prompt that is longer than all before, at the idle cluster.
        await clients.ask(7000)
        await clients.closed_loop(4, 6, part(1024))
        assert clients.statuses == {200: 33}
        # Long prompts, a burst, and closed loops of several sizes.
        await clients.at_once(2, part(4000))
        await clients.at_once(8, part(500))
        await clients.ask(part(4000))
        for count, each in ((4, 4), (32, 2), (4, 4)):
            await clients.closed_loop(count, each, part(100))
        assert clients.statuses == {200: 33 + 107}
