"""DecodeService: handoffs in, tokens out to the routers.

Owned by the worker's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
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


class Outbox:
    """Outputs on their way to one router: a message a step, with all sequences of the router.

    A stream that opens takes the place of the one before it. A router that reads slowly finds
    several steps in one message; what waits for it is bounded by its sequences' ``max_tokens``.
    """

    def __init__(self, now: float) -> None:
        self._outputs: list[TokenOutput] = []
        self._filled = asyncio.Event()
        self._reader = 0
        self._is_read = False
        self._unread_since = now

    def put(self, output: TokenOutput) -> None:
        """Add an output to the next message."""
        self._outputs.append(output)

    def flush(self) -> None:
        """A step is over: what was put may go."""
        if self._outputs:
            self._filled.set()

    def hurry(self) -> None:
        """The next message is to go at once, whatever it has."""
        self._filled.set()

    def open(self) -> int:
        """A stream begins to read. Returns its number."""
        self._reader += 1
        self._is_read = True
        # The stream before it, if it still waits, finds that its time is over.
        self._filled.set()
        return self._reader

    def is_current(self, reader: int) -> bool:
        """Whether this stream is the one that is to read."""
        return reader == self._reader

    def close(self, reader: int, now: float) -> None:
        """A stream has ended."""
        if self.is_current(reader):
            self._is_read = False
            self._unread_since = now

    def unread_for(self, now: float) -> float:
        """Seconds since a stream was open; 0 while one is."""
        return 0.0 if self._is_read else now - self._unread_since

    async def wait(self, timeout_s: float) -> None:
        """Until there is something to take, or ``timeout_s`` are over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._filled.wait()

    def take(self) -> list[TokenOutput]:
        """What has gathered."""
        self._filled.clear()
        outputs, self._outputs = self._outputs, []
        return outputs


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Turns messages into calls of the role."""

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
        outbox = role.sequences.outbox(request.router_id)
        reader = outbox.open()
        try:
            yield self._message()
            while not role.closing:
                busy = role.has_work_of(request.router_id)
                await outbox.wait(role.keepalive.next_s(busy=busy))
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
