"""One writer's calls, to the end of its stream.

    open ─the writer leaves, end()→ ended

A commit waits for bytes beside the other calls. What waits when the stream ends is given up: it has
done nothing yet. Owned by the control loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc.aio

from baton import convert
from baton.background import end_tasks
from baton.errors import BatonError, DeadlineExceeded, HandoffError, Unavailable
from baton.grpc_errors import as_baton_error
from baton.v1 import decode_pb2
from decode_worker.receiver import Offer

if TYPE_CHECKING:
    from decode_worker.role import DecodeRole

Context = grpc.aio.ServicerContext[decode_pb2.HandoffsRequest, decode_pb2.HandoffsResponse]


class HandoffStream:
    """See the module's text."""

    def __init__(self, role: DecodeRole, context: Context) -> None:
        self._role = role
        self._context = context
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._commits: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """One answer is written at a time."""

    async def run(self, requests: AsyncIterator[decode_pb2.HandoffsRequest]) -> None:
        """Answer calls until the writer leaves. Raises BatonError where ``end`` was called."""
        reading = asyncio.create_task(self._read(requests), name="handoffs-read")
        try:
            await asyncio.wait([reading, self._ended], return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                self._ended.result()
            reading.result()
        finally:
            await end_tasks([reading, *self._commits])

    def end(self, error: BatonError) -> None:
        """Have the writer told that no more is answered; idempotent."""
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # looked at, so that asyncio does not log it

    async def _read(self, requests: AsyncIterator[decode_pb2.HandoffsRequest]) -> None:
        async for request in requests:
            if request.HasField("commit"):
                commit = asyncio.create_task(self._answer(request), name="commit")
                self._commits.add(commit)
                commit.add_done_callback(self._commits.discard)
            else:
                await self._answer(request)

    async def _answer(self, request: decode_pb2.HandoffsRequest) -> None:
        try:
            response = await self._do(request)
        except Exception as failure:
            response = decode_pb2.HandoffsResponse(error=_refusal(as_baton_error(failure)))
        response.call = request.call
        async with self._turn:
            await self._context.write(response)

    async def _do(self, request: decode_pb2.HandoffsRequest) -> decode_pb2.HandoffsResponse:
        match request.WhichOneof("call_kind"):
            case "reserve":
                return decode_pb2.HandoffsResponse(reserve=self._reserve(request.reserve))
            case "commit":
                timeout_s = request.timeout_ms / 1000
                return decode_pb2.HandoffsResponse(
                    commit=await self._commit(request.commit, timeout_s)
                )
            case "abort":
                self._role.abort_handoff((request.abort.request_id, request.abort.attempt))
                return decode_pb2.HandoffsResponse(abort=decode_pb2.AbortResponse())
        raise HandoffError("this decode worker does not know that call")

    def _reserve(self, request: decode_pb2.ReserveRequest) -> decode_pb2.ReserveResponse:
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

    async def _commit(
        self, request: decode_pb2.CommitRequest, timeout_s: float
    ) -> decode_pb2.CommitResponse:
        try:
            async with asyncio.timeout(timeout_s):
                received = await self._role.commit_when_complete(
                    request.ticket_id, request.writer, request.first_token
                )
        except TimeoutError:
            raise DeadlineExceeded("the blocks have not come in time") from None
        return decode_pb2.CommitResponse(bytes=received)


def _refusal(error: BatonError) -> decode_pb2.CallError:
    retry_after_ms = None if error.retry_after is None else int(error.retry_after * 1000)
    return decode_pb2.CallError(
        code=error.code or "", message=error.message, retry_after_ms=retry_after_ms
    )
