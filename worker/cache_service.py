"""The gRPC face of a worker's cached blocks."""

from __future__ import annotations

import logging

import grpc.aio

from baton.grpc_errors import guarded
from baton.v1 import cache_pb2, cache_pb2_grpc
from engine.block_pool import BlockPool

Context = grpc.aio.ServicerContext[object, object]

log = logging.getLogger(__name__)


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Runs on the control loop, which owns the pool."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool

    @guarded
    async def DropCache(  # noqa: N802 - gRPC's name
        self, request: cache_pb2.DropCacheRequest, context: Context
    ) -> cache_pb2.DropCacheResponse:
        """See cache.proto. The index publisher sees the change and tells of it."""
        blocks = self._pool.counts().cached
        self._pool.drop_cache()
        log.info("dropped %d cached blocks", blocks)
        return cache_pb2.DropCacheResponse(blocks=blocks)
