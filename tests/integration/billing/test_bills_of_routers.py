"""The ledger against the usage that clients got, while router processes are killed and stopped and
Redis pauses. Real processes before an echo worker, no model.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import random
import signal
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis.asyncio

from baton.store.redis_client import redis_client
from loadtest.common.peer_servers import SERVED_NAME
from tests.support.integration.routers import DEADLINE_S, Routers, two_routers

CLIENTS = 6
PAUSE_S = 1.2
"""Longer than a router waits for Redis, twice."""
PRICES = {"input": 1.0, "cached_input": 0.5, "output": 2.0}
FAULTS = ("kill", "pause", "stop", "kill", "leave")


@dataclass
class Client:
    """Asks for answers of one size, one after another, as an agent of its own."""

    number: int
    answered: int = 0
    broken: int = 0

    @property
    def agent(self) -> str:
        return f"client-{self.number}"

    @property
    def size(self) -> tuple[int, int]:
        """Tokens of its prompts and of its answers."""
        return 3 + self.number, 4 + 3 * self.number

    async def ask(self, http: httpx.AsyncClient) -> None:
        prompt, output = self.size
        stream = self.number % 2 == 1
        body = {
            "model": SERVED_NAME,
            "prompt": list(range(1, prompt + 1)),
            "max_tokens": output,
            "ignore_eos": True,
            "metadata": {"agent": self.agent},
        }
        if stream:
            body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            answer = await http.post("/v1/completions", json=body)
            usage = _usage(answer.text, stream=stream) if answer.status_code == 200 else None
        except httpx.HTTPError:
            usage = None
        if usage is None:
            self.broken += 1
            # A router may be on its way back.
            await asyncio.sleep(0.05)
            return
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == self.size
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        self.answered += 1


def _usage(text: str, *, stream: bool) -> dict[str, Any] | None:
    """None if the answer was interrupted."""
    if stream:
        events = [one.removeprefix("data: ") for one in text.split("\n\n") if one]
        if len(events) < 2 or events[-1] != "[DONE]":
            return None
        text = events[-2]
    found: dict[str, Any] = json.loads(text)["usage"]
    return found


async def fail(routers: Routers, store: redis.asyncio.Redis, kind: str, number: int) -> None:
    """Cause one fault, and wait until the routers are there again."""
    victim = routers.processes[number % len(routers.processes)]
    if kind == "pause":
        await store.client_pause(int(1000 * PAUSE_S))
        await asyncio.sleep(PAUSE_S)
        return
    if kind == "stop":
        os.kill(victim.pid, signal.SIGSTOP)
        await asyncio.sleep(PAUSE_S)
        os.kill(victim.pid, signal.SIGCONT)
        return
    os.kill(victim.pid, signal.SIGKILL if kind == "kill" else signal.SIGTERM)
    await victim.wait()
    await victim.start()
    await victim.healthy()


@contextlib.asynccontextmanager
async def asking(routers: Routers) -> AsyncIterator[list[Client]]:
    """Clients that ask until the end of the block, and then wait for their last answers."""
    clients = [Client(number) for number in range(CLIENTS)]
    over = asyncio.Event()

    async def go_on(client: Client) -> None:
        async with routers.client() as http:
            while not over.is_set():
                await client.ask(http)

    async with asyncio.TaskGroup() as group:
        for client in clients:
            group.create_task(go_on(client))
        yield clients
        over.set()


async def rows_of(routers: Routers) -> dict[str, dict[str, Any]]:
    """Usage by agent."""
    async with routers.client() as http:
        answer = await http.get("/v1/usage", params={"by": "agent"})
    assert answer.status_code == 200, answer.text
    return {row["agent"]: row for row in answer.json()["data"]}


async def rows_at_last(
    routers: Routers, clients: list[Client], folder: Path
) -> dict[str, dict[str, Any]]:
    """Usage by agent, once journals of dead routers are gone and the living ones have reported."""
    before: dict[str, dict[str, Any]] = {}
    async with asyncio.timeout(DEADLINE_S):
        while True:
            rows = await rows_of(routers)
            billed = all(
                rows.get(one.agent, {}).get("requests", 0) >= one.answered for one in clients
            )
            # The sums are not read at one moment: bills must not come meanwhile.
            if billed and rows == before and _journals(folder) <= len(routers.processes):
                return rows
            before = rows
            await asyncio.sleep(0.5)


def _journals(folder: Path) -> int:
    return len(list(folder.glob("bills/*")))


async def check(
    seconds: float, kinds: Sequence[str], model: Path, url: str, folder: Path, seed: int
) -> None:
    order = random.Random(seed)
    async with (
        two_routers(model, url, data_dir=str(folder), prices=PRICES) as routers,
        redis_client(url) as store,
    ):
        async with asking(routers) as clients:
            ends = time.monotonic() + seconds
            number = 0
            while time.monotonic() < ends or number < len(kinds):
                await asyncio.sleep(order.uniform(0.2, 1.0))
                kind = kinds[number % len(kinds)]
                await fail(routers, store, kind, number)
                number += 1
        rows = await rows_at_last(routers, clients, folder)
    for client in clients:
        row, (prompt, output) = rows[client.agent], client.size
        # An answer may be complete and billed when its router is killed, and not be on the wire.
        unseen = row["requests"] - client.answered
        assert 0 <= unseen <= client.broken, (client, row)
        assert row["input_tokens"] == row["requests"] * prompt
        assert row["output_tokens"] == row["requests"] * output
        cost = row["requests"] * (prompt * 1000 + output * 2000)
        assert row["cost"] == f"{cost / 1e9:.9f}".rstrip("0").rstrip(".")
    assert sum(client.answered for client in clients) > number, "it has served meanwhile"


@pytest.mark.long
@pytest.mark.timeout(300)
async def test_bills_equal_usage_after_some_faults(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    await check(0.0, ("kill", "pause", "leave"), tiny_model, redis_url, tmp_path, seed=1)


@pytest.mark.long
@pytest.mark.timeout(1200)
async def test_bills_equal_usage_after_ten_minutes_of_faults(
    tiny_model: Path, redis_url: str, tmp_path: Path
) -> None:
    await check(600.0, FAULTS, tiny_model, redis_url, tmp_path, seed=2)
