"""What a cluster leaves in an operator's own Redis when it ends: nothing."""

from __future__ import annotations

import asyncio
import logging

import redis

from baton.autoscaling.traffic_store import TrafficStore
from baton.store.prefix_index import PrefixIndex
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from baton.store.supervision import PoolSizes
from deploy.processes.launcher_lease import told_key
from deploy.supervisor.status_store import StatusStore

log = logging.getLogger(__name__)

_FORGET_S = 5.0


async def forget_cluster(url: str, cluster_id: str) -> None:
    """Drop the index entries of all workers that have left. Never raises.

    Routers collect those of workers that die while a cluster runs; nobody does once it has ended,
    and they have no TTL.
    """
    try:
        async with asyncio.timeout(_FORGET_S), redis_client(url) as client:
            registry, index = Registry(client, cluster_id), PrefixIndex(client, cluster_id)
            await client.delete(told_key(cluster_id))
            await StatusStore(client, cluster_id).clear()
            await PoolSizes(client, cluster_id).clear()
            await TrafficStore(client, cluster_id).clear()
            for incarnation in await registry.dead():
                await index.collect(incarnation)
                await registry.forget(incarnation)
            if not await registry.all():
                await index.forget_generation()
    except (redis.RedisError, OSError, TimeoutError) as error:
        log.warning("index entries are left in Redis: %s", error)
