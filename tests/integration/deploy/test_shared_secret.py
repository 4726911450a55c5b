"""A cluster's secret in a Redis that loses its data."""

from __future__ import annotations

import asyncio

from baton.host.background import end_tasks
from baton.store.redis_client import redis_client
from deploy.store.shared_secret import SharedSecret

DEADLINE_S = 30.0


async def test_a_router_writes_the_secret_again_that_redis_has_lost(redis_url: str) -> None:
    """The next launcher finds the one that routers have: there may have been none meanwhile."""
    router, launcher = (SharedSecret(redis_url, "forgotten") for _ in range(2))
    secret = await router.read()
    keeping = asyncio.create_task(router.keep(secret))
    async with redis_client(redis_url) as client, asyncio.timeout(DEADLINE_S):
        lost = await client.keys("*forgotten*")
        assert await client.delete(*lost) == 1
        while not await client.exists(*lost):
            await asyncio.sleep(0.05)
    assert await launcher.read() == secret
    await end_tasks([keeping])
