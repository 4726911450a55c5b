"""The gRPC face of the decode role."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc.aio

from baton import convert
from baton.errors import Unavailable
from baton.grpc_errors import guarded
from baton.request import TokenOutput
from baton.v1 import decode_pb2, decode_pb2_grpc
from decode_worker.receiver import Offer

if TYPE_CHECKING:
    from decode_worker.role import DecodeRole

Context = grpc.aio.ServicerContext[object, object]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Turns messages into calls of the role. Runs on the control loop."""

    def __init__(self, role: DecodeRole) -> None:
        self._role = role

    @guarded
    async def Reserve(  # noqa: N802 - gRPC's name
        self, request: decode_pb2.ReserveRequest, context: Context
    ) -> decode_pb2.ReserveResponse:
        """See decode.proto."""
        if self._role.closing:
            raise Unavailable("this decode worker is stopping")
        ticket = self._role.reserve(
            Offer(
                fingerprint=request.fingerprint,
                geometry=convert.geometry_from_proto(request.geometry),
                incarnation=request.incarnation,
                writer=request.writer,
                spec=convert.sequence_from_proto(request.sequence),
            )
        )
        return decode_pb2.ReserveResponse(
            ticket_id=ticket.ticket_id,
            pinned_blocks=len(ticket.pinned),
            missing_blocks=len(ticket.missing),
            lease_ms=int(ticket.lease_s * 1000),
        )

    @guarded
    async def Commit(  # noqa: N802
        self, request: decode_pb2.CommitRequest, context: Context
    ) -> decode_pb2.CommitResponse:
        """See decode.proto."""
        received = await self._role.commit_when_complete(
            request.ticket_id, request.writer, request.first_token
        )
        return decode_pb2.CommitResponse(bytes=received)

    @guarded
    async def Abort(  # noqa: N802
        self, request: decode_pb2.AbortRequest, context: Context
    ) -> decode_pb2.AbortResponse:
        """See decode.proto."""
        attempt = (request.request_id, request.attempt)
        if request.writer:
            self._role.abort_handoff(attempt)
        else:
            self._role.abort(attempt)
        return decode_pb2.AbortResponse()

    async def StreamTokens(  # noqa: N802
        self, request: decode_pb2.StreamTokensRequest, context: Context
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        """See decode.proto. An empty message goes out every heartbeat."""
        role = self._role
        outbox = role.outbox(request.router_id)
        reader = outbox.open()
        heartbeat_s = role.context.settings.config.heartbeat_s
        try:
            yield self._message([])
            while not role.closing:
                await outbox.wait(heartbeat_s)
                if not outbox.is_current(reader):
                    return
                yield self._message(outbox.take())
            yield self._message(outbox.take())
        finally:
            outbox.close(reader, time.monotonic())

    def _message(self, outputs: list[TokenOutput]) -> decode_pb2.StreamTokensResponse:
        return decode_pb2.StreamTokensResponse(
            outputs=[convert.output_to_proto(output) for output in outputs],
            load=convert.load_to_proto(self._role.context.control.load()),
        )
