"""Lines of batches under the limits of the key that made the batch, in a real Valkey."""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
from prometheus_client import CollectorRegistry

from baton.config.access import KeyConfig
from baton.config.cluster import Config
from baton.store.redis_client import redis_client
from baton.telemetry.metrics import RouterMetrics
from router.access import rate_limits
from router.access.access import Access
from router.access.api_keys import Caller
from router.access.rate_limits import RateLimits
from router.batches.line import Line
from router.batches.line_runner import LineRunner
from router.batches.slots import LineSlots
from router.batches.storage.batch import Batch, LineResult
from router.inference.endpoint import Endpoint

DEADLINE_S = 60.0
URL = "/v1/completions"


def batch_of(key_id: str, tenant: str = "acme") -> Batch:
    return Batch("batch_1", tenant, key_id, "tiny", URL, "file-1", "1h", 1000, 4600, {})


def line(number: int) -> Line:
    return Line(number, f"line-{number}", URL, {})


class ScriptedEndpoint:
    """Answers lines when it is let."""

    def __init__(self) -> None:
        self.callers: list[Caller] = []
        self.running = 0
        self.most = 0
        self.may_end = asyncio.Event()

    async def run_line(self, body: dict[str, Any], caller: Caller) -> dict[str, Any]:
        self.callers.append(caller)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.may_end.wait()
        finally:
            self.running -= 1
        return {"usage": {}}

    async def until(self, count: int) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while len(self.callers) < count:
                await asyncio.sleep(0.01)


@pytest.fixture
async def limits(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RateLimits]:
    monkeypatch.setattr(rate_limits, "ANSWER_S", DEADLINE_S)
    client = redis_client(redis_url)
    opened = RateLimits(client, secrets.token_hex(4), RouterMetrics(CollectorRegistry()))
    yield opened
    await opened.close()
    await client.aclose()


class World:
    """Lines of one batch, whose key is in the file of keys."""

    def __init__(self, limits: RateLimits, most: int = 64, **key: int) -> None:
        self.endpoint = ScriptedEndpoint()
        self.access = Access(Config(), RouterMetrics(CollectorRegistry()), limits)
        digest = hashlib.sha256(b"a-key").hexdigest()
        self.key = KeyConfig(name="ann", sha256=digest, tenant="acme", priority=7, **key)
        self.access.set_keys([self.key])
        endpoints = {URL: cast(Endpoint, self.endpoint)}
        self.runner = LineRunner(endpoints, self.access, LineSlots(most, {}))
        self.tasks: list[asyncio.Task[LineResult]] = []

    def run(self, count: int) -> None:
        batch = batch_of("ann")
        self.tasks += [
            asyncio.create_task(self.runner.run(batch, line(number))) for number in range(count)
        ]

    async def close(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)


async def test_lines_obey_the_concurrency_of_their_key(limits: RateLimits) -> None:
    world = World(limits, concurrency=2)
    world.run(5)
    await world.endpoint.until(2)
    await asyncio.sleep(0.1)
    assert world.endpoint.running == 2
    world.endpoint.may_end.set()
    results = await asyncio.wait_for(asyncio.gather(*world.tasks), DEADLINE_S)
    assert all(result.ok for result in results)
    assert len(world.endpoint.callers) == 5
    assert world.endpoint.most == 2


async def test_lines_obey_the_requests_a_minute_of_their_key(limits: RateLimits) -> None:
    world = World(limits, requests_per_minute=3)
    world.endpoint.may_end.set()
    world.run(10)
    await world.endpoint.until(3)
    await asyncio.sleep(0.2)
    assert len(world.endpoint.callers) == 3
    await world.close()


async def test_lines_that_wait_for_their_key_hold_up_no_other_batch(limits: RateLimits) -> None:
    world = World(limits, most=1, requests_per_minute=1)
    world.endpoint.may_end.set()
    world.run(8)
    await world.endpoint.until(1)
    keyless = await asyncio.wait_for(world.runner.run(batch_of("", "other"), line(1)), DEADLINE_S)
    assert keyless.ok
    assert sum(task.done() for task in world.tasks) == 1
    await world.close()


async def test_a_key_of_the_file_keeps_its_priority_until_it_is_revoked(
    limits: RateLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("router.batches.line_runner.MAX_RETRY_S", 0.01)
    world = World(limits, concurrency=1)
    world.endpoint.may_end.set()
    result = await world.runner.run(batch_of("ann"), line(1))
    assert json.loads(result.record)["custom_id"] == "line-1"
    (caller,) = world.endpoint.callers
    assert (caller.key, caller.priority) == (world.key, 7)
    assert (caller.principal.tenant, caller.principal.key_id) == ("acme", "ann")
    assert world.runner.has_key(batch_of("ann"))
    # A key of the same name, of another tenant, is another one.
    assert not world.runner.has_key(batch_of("ann", "other"))
    world.access.set_keys([])
    assert not world.runner.has_key(batch_of("ann"))
    world.run(1)
    await asyncio.sleep(0.1)
    assert len(world.endpoint.callers) == 1
    await world.close()
