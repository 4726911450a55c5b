"""The gRPC face of a worker's cached blocks."""

from __future__ import annotations

import logging

import grpc.aio

from baton.rpc.grpc_errors import guarded
from baton.v1 import cache_pb2, cache_pb2_grpc
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tiers import BlockTiers

Context = grpc.aio.ServicerContext[object, object]

log = logging.getLogger(__name__)


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Runs on the control loop, which owns the pool."""

    def __init__(self, pool: BlockPool, tiers: BlockTiers | None = None) -> None:
        """``tiers`` are those behind the pool."""
        self._pool = pool
        self._tiers = tiers

    @guarded
    async def DropCache(  # noqa: N802 - gRPC's name
        self, request: cache_pb2.DropCacheRequest, context: Context
    ) -> cache_pb2.DropCacheResponse:
        """See cache.proto. The index publisher sees the change and tells of it."""
        if self._tiers is not None:
            blocks = self._tiers.drop_cache()
        else:
            blocks = self._pool.counts().cached
            self._pool.drop_cache()
        log.info("dropped %d cached blocks", blocks)
        return cache_pb2.DropCacheResponse(blocks=blocks)
