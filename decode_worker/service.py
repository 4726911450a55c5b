"""The gRPC face of the decode role."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import TYPE_CHECKING

import grpc.aio

from baton.request import TokenOutput
from baton.rpc import convert
from baton.rpc.grpc_channel import by_size
from baton.rpc.grpc_errors import grpc_boundary, guarded
from baton.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from decode_worker.handoff_stream import Context as HandoffsContext

if TYPE_CHECKING:
    from decode_worker.role import DecodeRole

Context = grpc.aio.ServicerContext[object, object]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Turns messages into calls of the role. Runs on the control loop."""

    def __init__(self, role: DecodeRole) -> None:
        self._role = role

    async def Handoffs(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[decode_pb2.HandoffsRequest],
        context: HandoffsContext,
    ) -> None:
        """See decode.proto."""
        async with grpc_boundary(context):  # type: ignore[arg-type]
            await self._role.answer_handoffs(request_iterator, context)

    @guarded
    async def Abort(  # noqa: N802
        self, request: decode_pb2.AbortRequest, context: Context
    ) -> decode_pb2.AbortResponse:
        """See decode.proto."""
        choice = request.choice if request.HasField("choice") else None
        self._role.abort((request.request_id, request.attempt), choice)
        return decode_pb2.AbortResponse()

    async def StreamTokens(  # noqa: N802
        self, request: decode_pb2.StreamTokensRequest, context: Context
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        """See decode.proto. Without tokens an empty message says that the worker lives."""
        role = self._role
        outbox = role.outbox(request.router_id)
        reader = outbox.open()
        try:
            yield self._message()
            while not role.closing:
                busy = role.has_work_of(request.router_id)
                await outbox.wait(role.beats.next_s(busy=busy))
                if not outbox.is_current(reader):
                    return
                for message in self._messages(outbox.take()):
                    yield message
            for message in self._messages(outbox.take()):
                yield message
        finally:
            outbox.close(reader, role.clock())

    def _messages(self, outputs: list[TokenOutput]) -> Iterator[decode_pb2.StreamTokensResponse]:
        """At least one message: it shows that the worker lives."""
        if not outputs:
            yield self._message()
        for some in by_size(map(convert.output_to_proto, outputs)):
            yield self._message(some)

    def _message(
        self, outputs: Sequence[worker_pb2.TokenOutput] = ()
    ) -> decode_pb2.StreamTokensResponse:
        load = convert.load_to_proto(self._role.context.core.load())
        return decode_pb2.StreamTokensResponse(outputs=outputs, load=load)
