"""Measures what heartbeats and polls of a large registry cost the store and a router."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import redis.asyncio

from baton.request import LoadSnapshot
from baton.store.redis_client import redis_client
from baton.store.registry import Registry
from loadtest.common.child_processes import bench_store
from loadtest.research.scaling.streams import worker_record

_TTL_S = 600.0
_POLLS = 4
"""Number of polls in which every worker changes once: four a second, with a heartbeat a second."""


@dataclass(frozen=True, slots=True)
class RegistryFigures:
    """Cost of one heartbeat, and of one poll per changed worker, in microseconds."""

    workers: int
    store_put_us: float
    """Store's time of a heartbeat."""
    store_read_us: float
    """Store's time of a poll, per worker that has changed since the last one."""
    router_read_us: float
    """Router's processor time of a poll, per worker that has changed."""
    store_idle_us: float
    """Store's time of a poll without changes."""
    router_idle_us: float


async def measure_registry(workers: int) -> RegistryFigures:
    """Put ``workers`` workers into a registry of a store of its own, and poll it while they change.

    Raises ConfigError if there is no Valkey.
    """
    with (
        tempfile.TemporaryDirectory(prefix="baton-bench-") as folder,
        bench_store(Path(folder)) as url,
    ):
        async with redis_client(url, timeout_s=30.0) as client:
            registry, reader = Registry(client, "bench"), Registry(client, "bench")
            records = [worker_record(number, 1) for number in range(workers)]
            for record in records:
                await registry.put(record, _TTL_S)
            await reader.read()
            put_us = read_us = router_s = 0.0
            for poll in range(_POLLS):
                changed = records[poll::_POLLS]
                load = LoadSnapshot(running=poll, free_blocks=3000, engine_steps=poll + 1)
                before = await _server_us(client)
                for record in changed:
                    await registry.put(replace(record, load=load), _TTL_S)
                put_us += (put := await _server_us(client)) - before
                began = time.process_time()
                await reader.read()
                router_s += time.process_time() - began
                read_us += await _server_us(client) - put
            before, began = await _server_us(client), time.process_time()
            await reader.read()
            idle_s = time.process_time() - began
            idle_us = await _server_us(client) - before
    return RegistryFigures(
        workers=workers,
        store_put_us=put_us / workers,
        store_read_us=read_us / workers,
        router_read_us=router_s / workers * 1e6,
        store_idle_us=idle_us,
        router_idle_us=idle_s * 1e6,
    )


async def _server_us(client: redis.asyncio.Redis) -> float:
    stats = await cast(Any, client.info("commandstats"))
    return float(
        sum(stats.get(f"cmdstat_{name}", {"usec": 0})["usec"] for name in ("eval", "evalsha"))
    )
