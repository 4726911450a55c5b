"""gRPC services of a worker in either role, and helpers that the roles' services share.

Owned by the worker's event loop.
"""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import grpc.aio

from baton.config.cluster import Config
from baton.rpc import convert
from baton.rpc.grpc_errors import guarded
from baton.rpc.registered_server import NO_SUCH_METHOD
from baton.v1 import (
    cache_pb2,
    cache_pb2_grpc,
    control_pb2,
    control_pb2_grpc,
    decode_pb2,
    prefill_pb2,
    transfer_pb2,
    transfer_pb2_grpc,
)
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.block_tiers import BlockTiers
from engine.scheduling.retention import RetentionBook
from kvtransfer.pairs.pair import Identity
from kvtransfer.transports.transport import Peer
from worker.exchange.exchange import Exchange

Context = grpc.aio.ServicerContext[object, object]
PairContext = grpc.aio.ServicerContext[transfer_pb2.TransferRequest, transfer_pb2.TransferResponse]

log = logging.getLogger(__name__)


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """Implements TransferService; see transfer.proto."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def Transfer(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[transfer_pb2.TransferRequest], context: PairContext
    ) -> None:
        """Serve one pair: a writer's stream that announces blocks. See transfer.proto."""
        await self._exchange.inbound.serve(request_iterator, context)

    @guarded
    async def Pull(  # noqa: N802
        self, request: transfer_pb2.PullRequest, context: Context
    ) -> transfer_pb2.PullResponse:
        """Send cached blocks to the ticket of another worker that has requested them. See
        transfer.proto."""
        geometry = convert.geometry_from_proto(request.geometry)
        blocks = await self._exchange.serve_pull(
            Identity(request.reader, request.fingerprint, geometry),
            Peer(request.reader, request.reader_address),
            request.holder,
            request.ticket_id,
            list(request.block_hashes),
        )
        return transfer_pb2.PullResponse(blocks=blocks)


class CacheServicer(cache_pb2_grpc.CacheServiceServicer):
    """Implements CacheService: manages the cached blocks of this worker."""

    def __init__(
        self, pool: BlockPool, retention: RetentionBook, tiers: BlockTiers | None = None
    ) -> None:
        """``tiers`` are the offload tiers behind the block pool; None if there are none."""
        self._pool = pool
        self._retention = retention
        self._tiers = tiers

    @guarded
    async def DropCache(  # noqa: N802 - gRPC's name
        self, request: cache_pb2.DropCacheRequest, context: Context
    ) -> cache_pb2.DropCacheResponse:
        """Drop cached blocks of this worker; see cache.proto. The index publisher then publishes
        the change."""
        if self._tiers is not None:
            blocks = self._tiers.drop_cache()
        else:
            blocks = self._pool.counts().cached
            self._pool.drop_cache()
        log.info("dropped %d cached blocks", blocks)
        return cache_pb2.DropCacheResponse(blocks=blocks)

    @guarded
    async def Unpin(  # noqa: N802 - gRPC's name
        self, request: cache_pb2.UnpinRequest, context: Context
    ) -> cache_pb2.UnpinResponse:
        """End a client's pin of a prefix; see cache.proto."""
        was_pinned = self._retention.end(request.tenant, request.name)
        return cache_pb2.UnpinResponse(was_pinned=was_pinned)


class Drainable(Protocol):
    """The methods of ``WorkerProcess`` that ControlService calls."""

    async def drain(self, deadline_s: float, *, finishes: bool = True) -> bool:
        """Accept no more work, wait until accepted work has ended, then stop. See
        ``WorkerProcess.drain``."""

    async def change_role(self, role: str, deadline_s: float) -> float:
        """Change to another role, and keep weights and caches. See
        ``WorkerProcess.change_role``."""


class ControlServicer(control_pb2_grpc.ControlServiceServicer):
    """Implements ControlService; see control.proto."""

    def __init__(self, process: Drainable) -> None:
        self._process = process

    @guarded
    async def Drain(  # noqa: N802 - gRPC's name
        self, request: control_pb2.DrainRequest, context: Context
    ) -> control_pb2.DrainResponse:
        """Drain this worker, then stop it. See control.proto."""
        # An operator has chosen the deadline.
        empty = await self._process.drain(request.deadline_ms / 1e3, finishes=False)
        return control_pb2.DrainResponse(empty=empty)

    @guarded
    async def ChangeRole(  # noqa: N802 - gRPC's name
        self, request: control_pb2.ChangeRoleRequest, context: Context
    ) -> control_pb2.ChangeRoleResponse:
        """Change this worker's role. See control.proto."""
        took_s = await self._process.change_role(request.role, request.deadline_ms / 1e3)
        return control_pb2.ChangeRoleResponse(took_ms=int(took_s * 1e3))


class RoleServices(grpc.aio.ServerInterceptor):
    """The gRPC services of the current role; they can change while the server runs.

    gRPC accepts no methods after a server has started. So the methods of every role are registered
    before. For each call, this interceptor looks up whether the current role has the method.
    Generated code adds services to this object as it would to a server.
    """

    def __init__(self) -> None:
        self._handlers: dict[str, Any] = {}

    def register(self, server: grpc.aio.Server) -> None:
        """Register the methods of every role with a server that has not started."""
        for file in (prefill_pb2.DESCRIPTOR, decode_pb2.DESCRIPTOR):
            for service in file.services_by_name.values():
                absent = {method.name: NO_SUCH_METHOD for method in service.methods}
                server.add_registered_method_handlers(service.full_name, absent)

    def clear(self) -> None:
        """Remove the current role's services, so that new calls find no method. Calls in progress
        continue."""
        self._handlers = {}

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Do nothing: generated code also registers the same methods by
        ``add_registered_method_handlers``."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Add methods of the current role, as ``grpc.aio.Server`` does."""
        for method, handler in handlers.items():
            self._handlers[f"/{service}/{method}"] = handler

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        """Serve a call by the current role, if it has the method; see
        ``grpc.aio.ServerInterceptor``."""
        found = self._handlers.get(handler_call_details.method)
        return found or await continuation(handler_call_details)


_PER_HANG = 4
"""Number of keepalives that a worker sends within the time after which routers consider a silent
worker as hung."""


@dataclass(frozen=True, slots=True)
class Keepalive:
    """Keepalive intervals of a stream without messages, in seconds. ``busy_s`` is the shorter
    interval, used while a router waits for a result."""

    busy_s: float
    idle_s: float

    @classmethod
    def of(cls, config: Config) -> Keepalive:
        """Derive the keepalive intervals from ``config``."""
        heartbeat_s, hang_s = config.advanced.heartbeat_s, config.advanced.hang_s
        return cls(min(heartbeat_s, hang_s / _PER_HANG), heartbeat_s)

    def next_s(self, *, busy: bool) -> float:
        """Return the seconds until the next keepalive. ``busy``: true while a router waits for a
        result."""
        return self.busy_s if busy else self.idle_s


DEFAULT_KEEPALIVE = Keepalive(busy_s=0.25, idle_s=1.0)
