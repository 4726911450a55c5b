"""The gRPC transport: blocks travel in checksummed segments over one client stream a ticket.

The receiver copies, never the writer: a stale segment is dropped before it is copied.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from concurrent.futures import Executor
from typing import Protocol

import grpc
import grpc.aio

from baton.errors import ChecksumMismatch, HandoffError, WorkerFailed
from baton.grpc_errors import error_from_rpc, grpc_boundary
from baton.v1 import transfer_pb2, transfer_pb2_grpc
from kvtransfer.checksum import checksum, segment_checksum
from kvtransfer.memory import BlockMemory
from kvtransfer.ticket import segments_of

NAME = "grpc"


class SegmentSink(Protocol):
    """The receiving worker's control loop, which owns the tickets."""

    def begin_copy(
        self, ticket_id: str, block_index: int, offset: int, length: int, now: float
    ) -> int | None:
        """See ``Ticket.begin_copy``."""

    def end_copy(self, ticket_id: str, length: int) -> None:
        """A copy has ended well."""

    def fail_copy(self, ticket_id: str, error: BaseException) -> None:
        """A copy has failed: the ticket ends."""


class BlockSender:
    """Pushes the blocks of one ticket. Owned by the sending worker's event loop."""

    def __init__(
        self, channel: grpc.aio.Channel, ticket_id: str, memory: BlockMemory, executor: Executor
    ) -> None:
        self._stub = transfer_pb2_grpc.TransferServiceStub(channel)
        self._ticket_id = ticket_id
        self._memory = memory
        self._executor = executor
        self._queue: asyncio.Queue[tuple[int, int] | None] = asyncio.Queue()

    def put(self, block_index: int, block: int) -> None:
        """Queue a complete block: its number among the ticket's missing ones, and its id here."""
        self._queue.put_nowait((block_index, block))

    def end(self) -> None:
        """No more blocks follow."""
        self._queue.put_nowait(None)

    async def run(self, peer: str, deadline_s: float) -> int:
        """Send until ``end``. Returns the bytes that the receiver has verified.

        Raises the receiver's error, or WorkerFailed if it is gone.
        """
        try:
            response = await self._stub.PushBlocks(self._requests(), timeout=deadline_s)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, peer) from error
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Nobody cancelled this: gRPC cancels a call to which it can no longer write.
            raise WorkerFailed(f"{peer}: the connection broke while blocks were sent") from None
        return int(response.bytes)

    async def _requests(self) -> AsyncIterator[transfer_pb2.PushBlocksRequest]:
        loop = asyncio.get_running_loop()
        while (item := await self._queue.get()) is not None:
            block_index, block = item
            for offset, length in segments_of(self._memory.block_bytes):
                data, digest = await loop.run_in_executor(
                    self._executor, self._read, block, offset, length
                )
                sealed = segment_checksum(digest, self._ticket_id, block_index, offset)
                yield transfer_pb2.PushBlocksRequest(
                    ticket_id=self._ticket_id,
                    block_index=block_index,
                    offset=offset,
                    data=data,
                    checksum=sealed,
                )

    def _read(self, block: int, offset: int, length: int) -> tuple[bytes, int]:
        data = self._memory.read(block, offset, length)
        return data, checksum(data)


class TransferServicer(transfer_pb2_grpc.TransferServiceServicer):
    """Receives segments, verifies them and copies them into place."""

    def __init__(self, sink: SegmentSink, memory: BlockMemory, executor: Executor) -> None:
        self._sink = sink
        self._memory = memory
        self._executor = executor

    async def PushBlocks(  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[transfer_pb2.PushBlocksRequest],
        context: grpc.aio.ServicerContext[object, object],
    ) -> transfer_pb2.PushBlocksResponse:
        """One ticket's segments, in any order."""
        received = 0
        async with grpc_boundary(context):
            async for request in request_iterator:
                received += await self._receive(request)
        return transfer_pb2.PushBlocksResponse(bytes=received)

    async def _receive(self, request: transfer_pb2.PushBlocksRequest) -> int:
        length = len(request.data)
        block = self._sink.begin_copy(
            request.ticket_id, request.block_index, request.offset, length, time.monotonic()
        )
        if block is None:
            return 0
        loop = asyncio.get_running_loop()
        # Shielded: the copy goes on when the call is cancelled, and its end must still be told.
        copy = loop.run_in_executor(self._executor, self._copy, block, request)
        copy.add_done_callback(lambda done: self._copied(request.ticket_id, length, done))
        await asyncio.shield(copy)
        return length

    def _copied(self, ticket_id: str, length: int, done: asyncio.Future[None]) -> None:
        if done.cancelled():
            self._sink.fail_copy(ticket_id, HandoffError("the copy was never made"))
        elif error := done.exception():
            self._sink.fail_copy(ticket_id, error)
        else:
            self._sink.end_copy(ticket_id, length)

    def _copy(self, block: int, request: transfer_pb2.PushBlocksRequest) -> None:
        digest = segment_checksum(
            checksum(request.data), request.ticket_id, request.block_index, request.offset
        )
        if digest != request.checksum:
            raise ChecksumMismatch(
                f"segment at {request.offset} of block {request.block_index} "
                f"of ticket {request.ticket_id} arrived damaged"
            )
        self._memory.write(block, request.offset, request.data)
