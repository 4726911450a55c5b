"""How long a fault is felt: until every stream runs again, and until the cluster is whole."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterable

import redis

from tests.chaos.faults.fault import Fault
from tests.chaos.harness.cluster import COUNT, ROLES, Cluster, is_alive
from tests.chaos.load.load import Load

_LOOK_S = 0.02
_LOOK_AT_ALL_S = 0.25
_FELT_S = 0.2
"""A message this soon after a fault was in flight before it."""
MAX_S = 60.0
"""What is not there again by then never will be."""


async def until_streams_run(load: Load, struck_at: float) -> float:
    """Seconds until every request of ``struck_at`` has received its next piece or ended, or
    ``MAX_S`` where one does not.
    """
    met = list(load.calls)
    later = struck_at + _FELT_S
    while time.monotonic() < struck_at + MAX_S:
        if all(call.ended or call.heard > later for call in met):
            return time.monotonic() - struck_at
        await asyncio.sleep(_LOOK_S)
    return MAX_S


async def until_answered(load: Load, struck_at: float) -> float:
    """Seconds until a request that arrived after ``struck_at`` was answered, or
    ``MAX_S`` where none is.
    """
    while time.monotonic() < struck_at + MAX_S:
        if load.newest_answered > struck_at:
            return time.monotonic() - struck_at
        await asyncio.sleep(_LOOK_S)
    return MAX_S


async def until_whole(
    cluster: Cluster, struck_at: float, faults: Iterable[Fault] = (), *, healed_at: float
) -> float:
    """Seconds from ``struck_at`` until every worker and router is there and usable, and until
    ``faults`` are over, by what they themselves know.

    Infinite where the cluster is not whole ``MAX_S`` after ``healed_at``: from then on it can heal.
    """
    while time.monotonic() < healed_at + MAX_S:
        if await _is_whole(cluster) and all([await fault.is_over() for fault in faults]):
            return time.monotonic() - struck_at
        await asyncio.sleep(_LOOK_AT_ALL_S)
    return math.inf


async def _is_whole(cluster: Cluster) -> bool:
    try:
        workers = await cluster.workers()
    except (redis.RedisError, OSError):
        return False
    slots = {worker.slot for worker in workers}
    all_live = all(map(is_alive, cluster.pids().values()))
    all_there = len(workers) == len(slots) == COUNT * len(ROLES)
    return all_live and all_there and await cluster.is_healthy()
