"""Where the supervisor's /metrics page is; `deploy.supervisor.status_store` writes what is read
here."""

from __future__ import annotations

import json

import redis.asyncio


def supervision_key(cluster_id: str) -> str:
    """Of the value in Redis that the supervisor writes: JSON, with a TTL."""
    return f"baton:{{{cluster_id}}}:supervision"


async def supervision_page(client: redis.asyncio.Redis, cluster_id: str) -> str | None:
    """host:port, None where no supervisor has said anything lately. Raises ``redis.RedisError``."""
    told = await client.get(supervision_key(cluster_id))
    try:
        return None if told is None else str(json.loads(told)["metrics_address"]) or None
    except (ValueError, TypeError, KeyError):
        # Another version's supervisor.
        return None
