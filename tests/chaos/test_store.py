from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator

import pytest
import redis

from baton.store.redis_client import redis_client
from tests.chaos.harness.proxy import Proxy
from tests.chaos.harness.store import Store

DEADLINE_S = 120.0


@pytest.fixture
async def store() -> AsyncIterator[Store]:
    store = Store(os.environ)
    try:
        await store.start()
        yield store
    finally:
        await store.stop()


async def test_a_replica_takes_the_stores_place_behind_the_same_address(store: Store) -> None:
    wire = Proxy(store.port)
    await wire.start()
    async with asyncio.timeout(DEADLINE_S), redis_client(store.url(wire.port)) as client:
        await client.set("before", 1)
        await store.add_replica()
        await client.set("since", 2)
        await client.wait(1, 0)
        await store.kill()
        with pytest.raises(redis.RedisError):
            await client.get("before")
        await store.promote()
        wire.lead_to(store.port)
        assert await client.mget("before", "since") == [b"1", b"2"]
        await client.set("after", 3)
        assert await store.keys("a") == ["after"]
    await wire.stop()


async def test_a_replica_that_is_not_needed_goes(store: Store) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await store.add_replica()
        await store.remove_replica()
        await store.remove_replica()
        assert (await store.client.info("clients"))["connected_clients"] >= 1
        # The next one is another.
        await store.add_replica()
        await store.kill()
        await store.promote()
        assert await store.keys("") == []


async def test_records_of_an_hour_are_no_keys_that_stay(store: Store) -> None:
    async with asyncio.timeout(DEADLINE_S):
        await store.client.set("c:usage:answers:t:2026-11-24T03", 1, ex=60)
        await store.client.set("c:usage:2026-11-24:agents", 1)
        await store.client.set("c:lease", 1, ex=60)
        assert await store.keys("c:") == ["c:lease", "c:usage:2026-11-24:agents"]
