"""What the cluster's caches hold, and dropping it. Owned by the router's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import redis
from prometheus_client import CollectorRegistry

from baton.errors import BatonError
from baton.rpc.grpc_errors import call_errors
from baton.store.prefix_index import IndexSize, PrefixIndex
from baton.telemetry.metrics import RouterMetrics
from baton.v1 import cache_pb2, cache_pb2_grpc
from router.workers.worker_link import WorkerLink

DROP_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """A worker's KV blocks by their state, as its last snapshot shows them."""

    slot: str
    role: str
    block_size: int
    """Tokens in a block."""
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    quarantined_blocks: int
    host_blocks: int = 0
    """Cached in the host's memory, behind the pool."""
    disk_blocks: int = 0


@dataclass(frozen=True, slots=True)
class CacheStats:
    """Of the whole cluster."""

    workers: tuple[WorkerCache, ...]
    index: IndexSize | None
    """None while Redis does not answer."""
    prompt_tokens: int
    """Since the routers started."""
    cached_prompt_tokens: int
    """Those of them whose KV was found."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """What a worker has done."""

    slot: str
    blocks: int
    error: str = ""
    """Not empty: it did nothing, and why."""


class CacheControl:
    """See the module's text."""

    def __init__(
        self, links: Callable[[], Sequence[WorkerLink]], index: PrefixIndex, metrics: RouterMetrics
    ) -> None:
        """``links`` gives the connections to all workers."""
        self._links = links
        self._index = index
        self._metrics = metrics

    async def stats(self) -> CacheStats:
        """What there is now; workers' figures are a heartbeat old at most."""
        try:
            size = await self._index.size()
        except redis.RedisError:
            size = None
        # Those of several processes are read from files.
        prompt, cached = await asyncio.to_thread(lambda: _hits(self._metrics.shown()))
        workers = sorted((_worker(link) for link in self._links()), key=lambda one: one.slot)
        return CacheStats(tuple(workers), size, prompt, cached)

    async def drop(self) -> list[Dropped]:
        """Have every worker forget the blocks that nobody uses. The index hears it from them."""
        links = sorted(self._links(), key=lambda link: link.record.slot)
        return await asyncio.gather(*map(self._drop, links))

    async def _drop(self, link: WorkerLink) -> Dropped:
        stub = cache_pb2_grpc.CacheServiceStub(link.channel)
        slot = link.record.slot
        try:
            with call_errors(slot):
                answer = await stub.DropCache(cache_pb2.DropCacheRequest(), timeout=DROP_DEADLINE_S)
        except BatonError as error:
            return Dropped(slot, 0, error.message)
        return Dropped(slot, answer.blocks)


def _worker(link: WorkerLink) -> WorkerCache:
    load = link.load
    return WorkerCache(
        slot=link.record.slot,
        role=link.record.role,
        block_size=link.record.geometry.block_size,
        total_blocks=link.record.total_blocks,
        free_blocks=load.free_blocks,
        cached_blocks=load.cached_blocks,
        used_blocks=load.used_blocks,
        quarantined_blocks=load.quarantined_blocks,
        host_blocks=load.host_blocks,
        disk_blocks=load.disk_blocks,
    )


def _hits(shown: CollectorRegistry) -> tuple[int, int]:
    """Prompt tokens, and those that were found, of all classes."""
    sums = {"baton_prompt_tokens_total": 0.0, "baton_cached_prompt_tokens_total": 0.0}
    for family in shown.collect():
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    prompt, cached = sums.values()
    return int(prompt), int(cached)
