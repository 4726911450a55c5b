"""The gRPC face of a worker's exchange."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc.aio

from baton.v1 import transfer_pb2, transfer_pb2_grpc
from worker.exchange import Exchange

Context = grpc.aio.ServicerContext[transfer_pb2.TransferRequest, transfer_pb2.TransferResponse]


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """Runs on the control loop."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange

    async def Transfer(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[transfer_pb2.TransferRequest], context: Context
    ) -> None:
        """See transfer.proto."""
        await self._exchange.inbound.serve(request_iterator, context)
