"""What each router process has counted, where the autoscaler finds it: one hash in Redis.

A field for each life of a router process, which that process writes about once a second. Its counts
grow for as long as it lives, and another life has another field: nothing that is read here ever
goes back. It goes ten minutes after nobody has written it.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from typing import Any, cast

import redis.asyncio

from baton.autoscaling.traffic_counts import ToldTraffic, TrafficCounts

TELL_S = 1.0
"""How often a router tells."""
TTL_S = 600


class TrafficBoard:
    """Raises ``redis.RedisError``. Owned by one event loop."""

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str) -> None:
        self._client = client
        self._key = f"baton:{{{cluster_id}}}:traffic"

    async def write(self, router: str, told: ToldTraffic) -> None:
        """Replace what was told of that router."""
        value = json.dumps({"beat": told.beat, **asdict(told.counts)})
        async with self._client.pipeline(transaction=False) as calls:
            calls.hset(self._key, router, value)
            calls.expire(self._key, TTL_S)
            await calls.execute()

    async def read(self) -> dict[str, ToldTraffic]:
        """All that is told, by router; what cannot be understood is left out."""
        told: dict[bytes, bytes] = await cast(Any, self._client.hgetall(self._key))
        parsed = {router.decode(): _parse(value) for router, value in told.items()}
        return {router: one for router, one in parsed.items() if one is not None}

    async def remove(self, routers: Collection[str]) -> None:
        """Strike off those that have gone."""
        if routers:
            await cast(Any, self._client.hdel(self._key, *routers))

    async def clear(self) -> None:
        """The cluster ends."""
        await cast(Any, self._client.delete(self._key))


def _parse(value: bytes) -> ToldTraffic | None:
    try:
        told = json.loads(value)
        return ToldTraffic(int(told["beat"]), TrafficCounts.parse(told))
    except (ValueError, TypeError, KeyError):
        # Another version's router.
        return None
