"""Operators' endpoints for the KV caches: statistics and drops, over HTTP and gRPC.

Owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import grpc.aio
import redis
from fastapi import FastAPI, Request
from prometheus_client import CollectorRegistry
from pydantic import BaseModel, ConfigDict

from baton.errors import BatonError
from baton.rpc.grpc_errors import call_errors, guarded
from baton.store.prefix_index import IndexSize, PrefixIndex
from baton.telemetry.metrics import RouterMetrics
from baton.v1 import cache_pb2, cache_pb2_grpc
from router.access.access import Access
from router.admin.operator_call import grpc_call, http_call
from router.grpc.call import Context, metadata_of
from router.workers.worker_link import WorkerLink

DROP_DEADLINE_S = 5.0


@dataclass(frozen=True, slots=True)
class WorkerCache:
    """A worker's KV blocks by state, from its last load snapshot."""

    slot: str
    role: str
    block_size: int
    """Number of tokens in a block."""
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    quarantined_blocks: int
    host_blocks: int = 0
    """Blocks cached in host memory."""
    disk_blocks: int = 0
    """Blocks cached on disk."""
    block_bytes: int = 0
    """Size of a block in bytes."""
    prompt_tokens: int = 0
    """Tokens of the prompts that the worker has computed since its start."""
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV the worker found in its caches, or fetched from another worker."""
    pinned_blocks: int = 0
    """Blocks covered by pinned prefixes, whether they are currently cached or not."""

    @property
    def entries(self) -> int:
        """Number of cached blocks of the worker: in the pool, in host memory and on disk."""
        return self.cached_blocks + self.host_blocks + self.disk_blocks

    @property
    def size_bytes(self) -> int:
        """Size of the worker's cached blocks in bytes."""
        return self.entries * self.block_bytes


@dataclass(frozen=True, slots=True)
class CacheStats:
    """The caches of the whole cluster."""

    workers: tuple[WorkerCache, ...]
    index: IndexSize | None
    """Size of the prefix index; None while Redis is unreachable."""
    prompt_tokens: int
    """Prompt tokens since the routers started."""
    cached_prompt_tokens: int
    """Prompt tokens whose KV was found in a cache."""


@dataclass(frozen=True, slots=True)
class Dropped:
    """Result of dropping the cached blocks of one worker."""

    slot: str
    blocks: int
    error: str = ""
    """The reason why the worker dropped no blocks; empty if it succeeded."""


class CacheControl:
    """Reads and drops the caches of all workers."""

    def __init__(
        self, links: Callable[[], Sequence[WorkerLink]], index: PrefixIndex, metrics: RouterMetrics
    ) -> None:
        """Create a control of the caches; ``links`` returns the connections to all workers."""
        self._links = links
        self._index = index
        self._metrics = metrics

    async def stats(self) -> CacheStats:
        """Return the current statistics of all caches. Figures of workers are at most a heartbeat
        old."""
        try:
            size = await self._index.size()
        except redis.RedisError:
            size = None
        # Reading the metrics of several processes reads files.
        prompt, cached = await asyncio.to_thread(lambda: _hits(self._metrics.shown()))
        workers = sorted((_worker(link) for link in self._links()), key=lambda one: one.slot)
        return CacheStats(tuple(workers), size, prompt, cached)

    async def drop(self) -> list[Dropped]:
        """Drop the unused cached blocks of all workers, which then update the index."""
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
        block_bytes=link.record.block_bytes,
        prompt_tokens=load.prompt_tokens,
        cached_prompt_tokens=load.cached_prompt_tokens,
        pinned_blocks=load.pinned_blocks,
    )


def _hits(shown: CollectorRegistry) -> tuple[int, int]:
    """Return the numbers of prompt tokens and of cached prompt tokens in a registry's counters,
    summed over all classes."""
    sums = {"baton_prompt_tokens_total": 0.0, "baton_cached_prompt_tokens_total": 0.0}
    for family in shown.collect():
        for sample in family.samples:
            if sample.name in sums:
                sums[sample.name] += sample.value
    prompt, cached = sums.values()
    return int(prompt), int(cached)


class WorkerCacheObject(BaseModel):
    """A worker's part of the caches. A block has the KV of `block_size` tokens."""

    model_config = ConfigDict(from_attributes=True, use_attribute_docstrings=True)

    slot: str
    role: str
    block_size: int
    total_blocks: int
    free_blocks: int
    cached_blocks: int
    used_blocks: int
    quarantined_blocks: int
    host_blocks: int
    disk_blocks: int
    block_bytes: int
    prompt_tokens: int
    """Tokens of the prompts that the worker has computed since its start."""
    cached_prompt_tokens: int
    """Prompt tokens whose KV was found in a cache."""
    pinned_blocks: int
    """Blocks covered by pinned prefixes. Dropped and evicted ones count until they are cached
    again."""
    total_entries: int
    """Number of cached blocks of the worker: in the pool, in host memory and on disk."""
    total_size_mb: float
    """Size of the cached blocks, in millions of bytes."""
    hit_rate: float
    """`cached_prompt_tokens` divided by `prompt_tokens`, 0 … 1; 0 before the first prompt."""

    @classmethod
    def of(cls, worker: WorkerCache) -> WorkerCacheObject:
        """Build the JSON object for a worker's cache, with the figures that are derived from the
        others."""
        return cls(
            **asdict(worker),
            total_entries=worker.entries,
            total_size_mb=_megabytes(worker.size_bytes),
            hit_rate=_share(worker.cached_prompt_tokens, worker.prompt_tokens),
        )


class CacheStatsObject(BaseModel):
    """The caches of all workers."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    object: str = "cache.stats"
    total_entries: int
    """Cached blocks of all workers. A block that several workers hold counts for each."""
    total_size_mb: float
    """Size of the cached blocks, in millions of bytes."""
    hit_rate: float
    """`cached_prompt_tokens` divided by `prompt_tokens`, 0 … 1; 0 before the first prompt."""
    pinned_blocks: int
    """Blocks covered by pinned prefixes. A block that several workers pin counts for each."""
    workers: list[WorkerCacheObject]
    index: IndexSize | None
    """Size of the prefix index; null while Redis is unreachable."""
    prompt_tokens: int
    """Prompt tokens since the routers started."""
    cached_prompt_tokens: int
    """Prompt tokens whose KV was found in a cache."""


def _megabytes(size: int) -> float:
    return round(size / 1e6, 3)


def _share(part: int, whole: int) -> float:
    return round(part / whole, 4) if whole else 0.0


class DroppedObject(BaseModel):
    slot: str
    blocks: int
    error: str | None


class CacheDropped(BaseModel):
    object: str = "cache.dropped"
    workers: list[DroppedObject]


class CacheApi:
    """The operators' endpoints for the KV caches over HTTP."""

    def __init__(self, control: CacheControl, access: Access) -> None:
        self._control = control
        self._access = access

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints to the app."""
        app.add_api_route("/v1/cache/stats", self.cache_stats, tags=["operations"])
        app.add_api_route("/v1/cache", self.drop_cache, methods=["DELETE"], tags=["operations"])

    async def cache_stats(self, request: Request) -> CacheStatsObject:
        """Show the contents of the workers' caches and the prefix index. Requires a key with scope
        admin.
        """
        self._access.check(request.headers, "admin")
        stats = await self._control.stats()
        workers = stats.workers
        return CacheStatsObject(
            total_entries=sum(one.entries for one in workers),
            total_size_mb=_megabytes(sum(one.size_bytes for one in workers)),
            hit_rate=_share(stats.cached_prompt_tokens, stats.prompt_tokens),
            pinned_blocks=sum(one.pinned_blocks for one in workers),
            workers=[WorkerCacheObject.of(one) for one in workers],
            index=stats.index,
            prompt_tokens=stats.prompt_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
        )

    async def drop_cache(self, request: Request) -> CacheDropped:
        """Drop the unused cached blocks of all workers. Requires a key with scope admin."""
        with http_call(self._access, request, "drop cache", "all workers"):
            dropped = await self._control.drop()
        return CacheDropped(
            workers=[
                DroppedObject(slot=one.slot, blocks=one.blocks, error=one.error or None)
                for one in dropped
            ]
        )


class OperatorServicer(cache_pb2_grpc.OperatorServiceServicer):
    """The operators' endpoints for the KV caches over gRPC."""

    def __init__(self, control: CacheControl, access: Access) -> None:
        self._control = control
        self._access = access

    def add_to(self, server: grpc.aio.Server) -> str:
        """Add the operators' service to a server that is not started yet. Return the service's full
        name. See ``router.grpc.call.Service``."""
        cache_pb2_grpc.add_OperatorServiceServicer_to_server(self, server)
        return cache_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name

    @guarded
    async def GetCacheStats(  # noqa: N802 - gRPC's name
        self, request: cache_pb2.GetCacheStatsRequest, context: Context
    ) -> cache_pb2.GetCacheStatsResponse:
        """Return the statistics of all KV caches as a message of cache.proto."""
        self._access.check(metadata_of(context), "admin")
        return _stats_message(await self._control.stats())

    @guarded
    async def DropCaches(  # noqa: N802 - gRPC's name
        self, request: cache_pb2.DropCachesRequest, context: Context
    ) -> cache_pb2.DropCachesResponse:
        """Drop the unused cached blocks of all workers, and return the results as a message of
        cache.proto."""
        with grpc_call(self._access, context, "drop cache", "all workers"):
            dropped = await self._control.drop()
        return _dropped_message(dropped)


def _stats_message(stats: CacheStats) -> cache_pb2.GetCacheStatsResponse:
    index = stats.index
    return cache_pb2.GetCacheStatsResponse(
        workers=[
            cache_pb2.WorkerCache(
                slot=one.slot,
                role=one.role,
                block_size=one.block_size,
                total_blocks=one.total_blocks,
                free_blocks=one.free_blocks,
                cached_blocks=one.cached_blocks,
                used_blocks=one.used_blocks,
                quarantined_blocks=one.quarantined_blocks,
                host_blocks=one.host_blocks,
                disk_blocks=one.disk_blocks,
                block_bytes=one.block_bytes,
                prompt_tokens=one.prompt_tokens,
                cached_prompt_tokens=one.cached_prompt_tokens,
                pinned_blocks=one.pinned_blocks,
            )
            for one in stats.workers
        ],
        index_blocks=None if index is None else index.blocks,
        index_bytes=None if index is None else index.bytes,
        prompt_tokens=stats.prompt_tokens,
        cached_prompt_tokens=stats.cached_prompt_tokens,
    )


def _dropped_message(dropped: list[Dropped]) -> cache_pb2.DropCachesResponse:
    return cache_pb2.DropCachesResponse(
        workers=[
            cache_pb2.DroppedCache(slot=one.slot, blocks=one.blocks, error=one.error)
            for one in dropped
        ]
    )
