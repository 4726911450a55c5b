"""The gRPC face of a worker's exchange."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from baton.rpc import convert
from baton.rpc.grpc_errors import guarded
from baton.v1 import transfer_pb2, transfer_pb2_grpc
from kvtransfer.pairs.pair import Identity
from kvtransfer.transports.transport import Peer
from worker.exchange.exchange import Exchange

Context = grpc.aio.ServicerContext[object, object]
PairContext = grpc.aio.ServicerContext[transfer_pb2.TransferRequest, transfer_pb2.TransferResponse]


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """Runs on the control loop."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def Transfer(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[transfer_pb2.TransferRequest], context: PairContext
    ) -> None:
        """See transfer.proto."""
        await self._exchange.inbound.serve(request_iterator, context)

    @guarded
    async def Pull(  # noqa: N802
        self, request: transfer_pb2.PullRequest, context: Context
    ) -> transfer_pb2.PullResponse:
        """See transfer.proto."""
        geometry = convert.geometry_from_proto(request.geometry)
        blocks = await self._exchange.give(
            Identity(request.reader, request.fingerprint, geometry),
            Peer(request.reader, request.reader_address),
            request.holder,
            request.ticket_id,
            list(request.block_hashes),
        )
        return transfer_pb2.PullResponse(blocks=blocks)
