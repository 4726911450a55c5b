"""What a quiet cluster holds, and what of it should not be there.

With no request in flight every block, ticket and stream is released, the store has the keys of
the living alone, and no process has more descriptors or memory than it had at first.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import httpx
import psutil
import redis

from tests.chaos.harness.cluster import COUNT, ROLES, Cluster, Worker, series

_LOOK_S = 0.25
QUIET_S = 15.0
"""What is held for longer than this after the last request, in seconds, is leaked."""
_MORE_DESCRIPTORS = 16
"""Connections come and go: this many more than at first are no leak."""
_MORE_BYTES = {"router": 64 << 20, "prefill": 128 << 20, "decode": 128 << 20}
"""Memory of its own that is no leak: an allocator keeps some of what it was given."""
_POOL = "memfd:baton-kv"
"""What a worker's pool of blocks is called where it is mapped."""
_DRAWN = re.compile(r"[0-9a-f]{8,}$")
_SLOT = re.compile(r":(prefill|decode)-\d+")
"""In a rollout each worker's slot has a number of its own."""


@dataclass(frozen=True, slots=True)
class Size:
    """Of one process."""

    descriptors: int
    own_bytes: int
    """Private memory: neither pools, which fill with time, nor weights."""
    pools: int
    """Pools of blocks that it has mapped, its own and other workers'. They cost memory for as long
    as any process maps them, though their owner may be dead."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What the cluster held before anything was done to it."""

    sizes: Mapping[str, Size]
    """By the process's name."""
    keys: Mapping[str, int]
    """How many keys of each kind the store had."""


async def footprint(cluster: Cluster) -> Footprint:
    """Of a cluster that is quiet."""
    return Footprint(_sizes(cluster), await _keys(cluster))


async def leaks(cluster: Cluster, first: Footprint) -> list[str]:
    """What a quiet cluster still holds after ``QUIET_S`` seconds; empty as soon as it is nothing.

    Each line names the process and what it holds.
    """
    until = time.monotonic() + QUIET_S
    while (found := await _held(cluster, first)) and time.monotonic() < until:
        await asyncio.sleep(_LOOK_S)
    return found


async def _held(cluster: Cluster, first: Footprint) -> list[str]:
    try:
        workers = await cluster.workers()
        found = [line for worker in workers for line in await _of_worker(cluster, worker)]
        found += await _of_routers(cluster)
        found += _more_keys(await _keys(cluster), first.keys)
    except (httpx.HTTPError, redis.RedisError, OSError) as error:
        return [f"cluster: cannot be looked at: {type(error).__name__}: {error}"]
    return found + _grown(_sizes(cluster), first.sizes) + _processes(cluster)


async def _of_worker(cluster: Cluster, worker: Worker) -> list[str]:
    page = await cluster.page(worker.record.metrics_address)
    held = {
        "running sequences": series(page, "baton_sequences", state="running"),
        "waiting sequences": series(page, "baton_sequences", state="waiting"),
        "used blocks": series(page, "baton_kv_blocks", state="used"),
        "quarantined blocks": series(page, "baton_kv_blocks", state="quarantined"),
        "bytes in flight": series(page, "baton_transfer_in_flight_bytes"),
        "missing blocks": worker.record.total_blocks - series(page, "baton_kv_blocks"),
    }
    return [f"{worker.slot}: {count:.0f} {what}" for what, count in held.items() if count]


async def _of_routers(cluster: Cluster) -> list[str]:
    page = await cluster.page(cluster.fronts.http)
    held = {
        "active requests": series(page, "baton_active_requests"),
        "waiting requests": series(page, "baton_waiting_requests"),
    }
    return [f"routers: {count:.0f} {what}" for what, count in held.items() if count]


async def _keys(cluster: Cluster) -> dict[str, int]:
    names = await cluster.store.keys(cluster.key_prefix)
    bare = (_DRAWN.sub("*", name.removeprefix(cluster.key_prefix)) for name in names)
    return Counter(_SLOT.sub(r":\1-*", name) for name in bare)


def _more_keys(now: Mapping[str, int], first: Mapping[str, int]) -> list[str]:
    return [
        f"store: {count} keys {kind}, at first {first.get(kind, 0)}"
        for kind, count in now.items()
        if count > first.get(kind, 0)
    ]


def _sizes(cluster: Cluster) -> dict[str, Size]:
    sizes = {}
    for name, pid in cluster.pids().items():
        with contextlib.suppress(psutil.Error, OSError):
            process = psutil.Process(pid)
            memory = process.memory_info()
            pools = Path(f"/proc/{pid}/maps").read_text().count(_POOL)
            sizes[name] = Size(process.num_fds(), memory.rss - memory.shared, pools)
    return sizes


def _grown(now: Mapping[str, Size], first: Mapping[str, Size]) -> list[str]:
    found = []
    for name, at_first in first.items():
        size = now.get(name, at_first)
        if size.descriptors > at_first.descriptors + _MORE_DESCRIPTORS:
            found.append(f"{name}: {size.descriptors} descriptors, at first {at_first.descriptors}")
        if size.own_bytes > at_first.own_bytes + _MORE_BYTES[name.partition("-")[0]]:
            mebibytes = [one.own_bytes >> 20 for one in (size, at_first)]
            found.append(f"{name}: {mebibytes[0]} MiB of memory, at first {mebibytes[1]}")
        if size.pools > COUNT * len(ROLES):
            found.append(f"{name}: {size.pools} pools mapped, of {COUNT * len(ROLES)} workers")
    return found


def _processes(cluster: Cluster) -> list[str]:
    """Workers, supervisors and routers that are too many: given up, and not ended."""
    lines = []
    for process in cluster.processes():
        with contextlib.suppress(psutil.Error):
            lines.append(" ".join(process.cmdline()))
    count = COUNT * len(ROLES)
    most = {"WorkerActor": count, "baton worker": count}
    most |= {"SupervisorActor": 1, "router.main": COUNT}
    counts = {name: sum(name in line for line in lines) for name in most}
    return [
        f"cluster: {count} processes {name}, expected {most[name]}"
        for name, count in counts.items()
        if count > most[name]
    ]
