"""The operators' endpoints, over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Mapping

import grpc.aio
from fastapi import FastAPI, Request
from pydantic import BaseModel

from baton.rpc.grpc_errors import guarded
from baton.v1 import cache_pb2, cache_pb2_grpc
from router.access.access import Access
from router.admin.cache_control import CacheControl, CacheStats, Dropped
from router.grpc.call import Context, metadata_of


class WorkerCacheObject(BaseModel):
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


class IndexObject(BaseModel):
    blocks: int
    bytes: int


class CacheStatsObject(BaseModel):
    object: str = "cache.stats"
    workers: list[WorkerCacheObject]
    index: IndexObject | None
    """null while Redis does not answer."""
    prompt_tokens: int
    cached_prompt_tokens: int


class DroppedObject(BaseModel):
    slot: str
    blocks: int
    error: str | None


class CacheDropped(BaseModel):
    object: str = "cache.dropped"
    workers: list[DroppedObject]


class Operators:
    """Who may use these endpoints; the gates in front of them ask the same, for all endpoints."""

    def __init__(self, access: Access) -> None:
        self._access = access

    def check(self, headers: Mapping[str, str]) -> None:
        """By headers, or gRPC metadata. Raises Unauthenticated, Forbidden."""
        self._access.check(headers, "admin")


class OperatorApi:
    """HTTP."""

    def __init__(self, control: CacheControl, operators: Operators) -> None:
        self._control = control
        self._operators = operators

    def mount(self, app: FastAPI) -> None:
        """Add the endpoints to the app."""
        app.add_api_route("/v1/cache/stats", self.cache_stats, tags=["operations"])
        app.add_api_route("/v1/cache", self.drop_cache, methods=["DELETE"], tags=["operations"])

    async def cache_stats(self, request: Request) -> CacheStatsObject:
        """What the workers' caches and the prefix index hold. Needs an admin's key."""
        self._operators.check(request.headers)
        stats = await self._control.stats()
        index = stats.index
        return CacheStatsObject(
            workers=[
                WorkerCacheObject.model_validate(one, from_attributes=True) for one in stats.workers
            ],
            index=None if index is None else IndexObject(blocks=index.blocks, bytes=index.bytes),
            prompt_tokens=stats.prompt_tokens,
            cached_prompt_tokens=stats.cached_prompt_tokens,
        )

    async def drop_cache(self, request: Request) -> CacheDropped:
        """Have all workers forget the blocks that nobody uses. Needs an admin's key."""
        self._operators.check(request.headers)
        dropped = await self._control.drop()
        return CacheDropped(
            workers=[
                DroppedObject(slot=one.slot, blocks=one.blocks, error=one.error or None)
                for one in dropped
            ]
        )


class OperatorServicer(cache_pb2_grpc.OperatorServiceServicer):
    """gRPC."""

    def __init__(self, control: CacheControl, operators: Operators) -> None:
        self._control = control
        self._operators = operators

    def add_to(self, server: grpc.aio.Server) -> str:
        """See ``router.grpc.call.Service``."""
        cache_pb2_grpc.add_OperatorServiceServicer_to_server(self, server)
        return cache_pb2.DESCRIPTOR.services_by_name["OperatorService"].full_name

    @guarded
    async def GetCacheStats(  # noqa: N802 - gRPC's name
        self, request: cache_pb2.GetCacheStatsRequest, context: Context
    ) -> cache_pb2.GetCacheStatsResponse:
        """See cache.proto."""
        self._operators.check(metadata_of(context))
        return _stats_message(await self._control.stats())

    @guarded
    async def DropCaches(  # noqa: N802 - gRPC's name
        self, request: cache_pb2.DropCachesRequest, context: Context
    ) -> cache_pb2.DropCachesResponse:
        """See cache.proto."""
        self._operators.check(metadata_of(context))
        return _dropped_message(await self._control.drop())


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
