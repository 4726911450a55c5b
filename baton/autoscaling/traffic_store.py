"""The traffic counts of all router processes, in one Redis hash.

Each router process writes its own field about once a second. A restarted process has a new field,
so counts never decrease. The hash expires ten minutes after the last write.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import asdict
from typing import Any, cast

import redis.asyncio

from baton.autoscaling.traffic import RouterTraffic, TrafficCounts

TELL_S = 1.0
"""Interval between two traffic reports of a router, in seconds."""
TTL_S = 600


class TrafficStore:
    """Reads and writes the routers' reports.

    Raises ``redis.RedisError``. Owned by one event loop.
    """

    def __init__(self, client: redis.asyncio.Redis, cluster_id: str) -> None:
        self._client = client
        self._key = f"baton:{{{cluster_id}}}:traffic"

    async def write(self, router: str, told: RouterTraffic) -> None:
        """Replace the traffic report of a router."""
        value = json.dumps({"beat": told.beat, **asdict(told.counts)})
        async with self._client.pipeline(transaction=False) as calls:
            calls.hset(self._key, router, value)
            calls.expire(self._key, TTL_S)
            await calls.execute()

    async def read(self) -> dict[str, RouterTraffic]:
        """Return the traffic reports of all routers, by router, without those that cannot be
        parsed."""
        told: dict[bytes, bytes] = await cast(Any, self._client.hgetall(self._key))
        parsed = {router.decode(): _parse(value) for router, value in told.items()}
        return {router: one for router, one in parsed.items() if one is not None}

    async def remove(self, routers: Collection[str]) -> None:
        """Remove the traffic reports of routers that have ended."""
        if routers:
            await cast(Any, self._client.hdel(self._key, *routers))

    async def clear(self) -> None:
        """Delete the reports of all routers when the cluster ends."""
        await cast(Any, self._client.delete(self._key))


def _parse(value: bytes) -> RouterTraffic | None:
    try:
        told = json.loads(value)
        return RouterTraffic(int(told["beat"]), TrafficCounts.parse(told))
    except (ValueError, TypeError, KeyError):
        # The report is from a router of another version.
        return None
