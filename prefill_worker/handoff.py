"""The pushing side of one handoff.

    (no ticket) ─reserve→ RESERVED ─blocks→ RECEIVING ─commit→ COMMITTED
    RESERVED, RECEIVING ─abort→ RELEASED

Owned by the prefill worker's control loop.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time

import grpc.aio

from baton import convert
from baton.errors import BatonError, DeadlineExceeded, NoRoom, TicketEnded
from baton.grpc_errors import error_from_rpc
from baton.request import SequenceSpec
from baton.v1 import decode_pb2, decode_pb2_grpc
from kvtransfer.grpc_transport import BlockSender
from worker.role import WorkerContext

log = logging.getLogger(__name__)

ABORT_DEADLINE_S = 2.0
"""An abort that does not arrive in this time is left to the lease."""


class Handoff:
    """One ticket at one decode worker, seen from its writer."""

    def __init__(
        self,
        context: WorkerContext,
        channel: grpc.aio.Channel,
        spec: SequenceSpec,
        *,
        address: str,
        incarnation: str,
        deadline: float,
    ) -> None:
        """``deadline`` is the request's, on this worker's monotonic clock."""
        self.address = address
        self.ticket_id = ""
        self.pinned_blocks = 0
        self._context = context
        self._channel = channel
        self._stub = decode_pb2_grpc.DecodeServiceStub(channel)
        self._spec = spec
        self._incarnation = incarnation
        self._deadline = deadline
        self._missing_blocks = 0
        self._put = 0
        self._sender: BlockSender | None = None
        self._sending: asyncio.Task[int] | None = None
        self._committed = False

    def _left(self) -> float:
        left = self._deadline - time.monotonic()
        if left <= 0:
            raise DeadlineExceeded("the request's deadline passed during its prefill")
        return left

    async def reserve(self) -> None:
        """Get a ticket; waits for room as long as the request has time. Raises BatonError."""
        while True:
            try:
                response = await self._reserve_once()
                break
            except NoRoom as error:
                wait = min(error.retry_after or 0.1, self._left())
                await asyncio.sleep(wait)
        self.ticket_id = response.ticket_id
        self.pinned_blocks = response.pinned_blocks
        self._missing_blocks = response.missing_blocks
        self._sender = BlockSender(
            self._channel, self.ticket_id, self._context.memory, self._context.transfers
        )
        self._sending = asyncio.create_task(self._sender.run(self.address, self._left()))

    async def _reserve_once(self) -> decode_pb2.ReserveResponse:
        left = self._left()
        sequence = convert.sequence_to_proto(self._spec)
        sequence.deadline_ms = int(left * 1000)
        request = decode_pb2.ReserveRequest(
            fingerprint=self._context.engine.fingerprint,
            geometry=convert.geometry_to_proto(self._context.engine.cache.geometry()),
            incarnation=self._incarnation,
            writer=self._context.incarnation,
            sequence=sequence,
        )
        try:
            return await self._stub.Reserve(request, timeout=left)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.address) from error

    def computed(self, block_table: list[int], blocks: int) -> None:
        """The first ``blocks`` of the sequence's blocks are complete: push what is missing."""
        assert self._sender is not None, "no ticket"
        while self.pinned_blocks + self._put < blocks and self._put < self._missing_blocks:
            self._sender.put(self._put, block_table[self.pinned_blocks + self._put])
            self._put += 1

    def check(self) -> None:
        """Raise what has broken the transfer, if anything has."""
        if self._sending is not None and self._sending.done():
            if self._sending.cancelled():
                raise TicketEnded(f"{self.address} has ended ticket {self.ticket_id}")
            self._sending.result()

    @property
    def sending(self) -> asyncio.Task[int] | None:
        """The transfer under way; done early only when it has failed."""
        return self._sending

    async def commit(self, first_token: int) -> int:
        """Wait for the last byte, then let the sequence run there. Returns the bytes pushed."""
        assert self._sender is not None, "no ticket"
        assert self._sending is not None, "no ticket"
        self._sender.end()
        await asyncio.wait([self._sending])
        self.check()
        request = decode_pb2.CommitRequest(
            ticket_id=self.ticket_id, writer=self._context.incarnation, first_token=first_token
        )
        try:
            await self._stub.Commit(request, timeout=self._left())
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error, self.address) from error
        self._committed = True
        return self._sending.result()

    def stop(self) -> None:
        """Read no more blocks: they may be given back. Idempotent."""
        if self._sending is not None:
            self._sending.cancel()

    async def close(self) -> None:
        """After ``stop``: end at the receiver what is not committed. Never raises."""
        if self._sending is not None:
            with contextlib.suppress(BatonError, asyncio.CancelledError):
                await self._sending
        if self._committed:
            return
        self._committed = True
        request = decode_pb2.AbortRequest(
            request_id=self._spec.request_id,
            attempt=self._spec.attempt,
            writer=self._context.incarnation,
        )
        try:
            await self._stub.Abort(request, timeout=ABORT_DEADLINE_S)
        except grpc.aio.AioRpcError as error:
            log.info("abort at %s did not arrive: %s", self.address, error.code())


async def renew_leases(
    channel: grpc.aio.Channel, writer: str, handoffs: list[Handoff], timeout_s: float
) -> None:
    """One heartbeat for all handoffs to one decode worker. Raises BatonError."""
    stub = decode_pb2_grpc.DecodeServiceStub(channel)
    request = decode_pb2.RenewLeasesRequest(
        writer=writer, ticket_ids=[handoff.ticket_id for handoff in handoffs]
    )
    try:
        response = await stub.RenewLeases(request, timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        raise error_from_rpc(error, handoffs[0].address) from error
    ended = set(response.ended_ticket_ids)
    for handoff in handoffs:
        if handoff.ticket_id in ended:
            handoff.stop()
