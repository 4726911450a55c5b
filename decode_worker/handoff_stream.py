"""One writer's calls, to the end of its stream.

    open ─the writer leaves, end()→ ended

A commit waits for bytes and for its grammar. A reserve waits for room and for the other ranks of
this worker. Other calls go on meanwhile. What waits when the stream ends is given up: it has done
nothing yet. Owned by the event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

import grpc.aio

from baton.errors import BatonError, DeadlineExceeded, HandoffError
from baton.host.background import end_tasks
from baton.rpc import convert
from baton.rpc.grpc_errors import as_baton_error
from baton.v1 import decode_pb2
from decode_worker.receiver import Offer
from kvtransfer.tickets.ticket import Ticket

if TYPE_CHECKING:
    from decode_worker.role import DecodeRole

Request = decode_pb2.HandoffsRequest
Response = decode_pb2.HandoffsResponse
Context = grpc.aio.ServicerContext[Request, Response]


class HandoffStream:
    """The calls of one writer, answered in any order."""

    def __init__(self, role: DecodeRole, context: Context) -> None:
        self._role = role
        self._context = context
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """One answer is written at a time."""

    async def run(self, requests: AsyncIterator[Request]) -> None:
        """Answer calls until the writer leaves. Raises BatonError where ``end`` was called."""
        reading = asyncio.create_task(self._read(requests), name="handoffs-read")
        try:
            await asyncio.wait([reading, self._ended], return_when=asyncio.FIRST_COMPLETED)
            if self._ended.done():
                self._ended.result()
            reading.result()
        finally:
            await end_tasks([reading, *self._waiting])

    def end(self, error: BatonError) -> None:
        """Have the writer told that no more is answered; idempotent."""
        if not self._ended.done():
            self._ended.set_exception(error)
            self._ended.exception()  # looked at, so that asyncio does not log it

    async def _read(self, requests: AsyncIterator[Request]) -> None:
        async for request in requests:
            if request.HasField("commit") and self._role.must_wait(request.commit.ticket_id):
                commit = asyncio.create_task(self._commit_in_time(request), name="commit")
                self._waiting.add(commit)
                commit.add_done_callback(self._waiting.discard)
                continue
            if request.HasField("reserve"):
                # The reserve is queued at once: the next message on the stream may be its abort.
                await self._reserve(request)
            else:
                await self._write(self._answer(request))

    async def _reserve(self, request: Request) -> None:
        response = Response(call=request.call)
        try:
            asked = self._request(request.reserve)
        except Exception as failure:
            _refuse(response, failure)
            await self._write(response)
            return
        opened = self._role.receiver.blocks.opened
        if asked.done() and opened(asked.result().ticket_id) is None:
            self._promise(asked.result(), response.reserve)
            await self._write(response)
            return
        answer = asyncio.create_task(self._reserve_in_time(request, asked), name="reserve")
        self._waiting.add(answer)
        answer.add_done_callback(self._waiting.discard)

    async def _reserve_in_time(self, request: Request, asked: asyncio.Future[Ticket]) -> None:
        """Answer once there is room, and all ranks of this worker let the writer in."""
        response = Response(call=request.call)
        try:
            async with asyncio.timeout(request.timeout_ms / 1000):
                ticket = await asked
                opened = self._role.receiver.blocks.opened(ticket.ticket_id)
                if opened is not None:
                    # Another call may wait for the same ticket.
                    await asyncio.shield(opened)
            self._promise(ticket, response.reserve)
        except TimeoutError:
            _refuse(response, DeadlineExceeded("there was no room in time"))
        except Exception as failure:
            _refuse(response, failure)
        await self._write(response)

    async def _write(self, response: Response) -> None:
        async with self._turn:
            await self._context.write(response)

    def _answer(self, request: Request) -> Response:
        response = Response(call=request.call)
        try:
            match request.WhichOneof("call_kind"):
                case "commit":
                    commit = request.commit
                    firsts = convert.first_tokens_from_proto(commit)
                    response.commit.bytes = self._role.commit(
                        commit.ticket_id, commit.writer, firsts
                    )
                case "abort":
                    self._role.abort_handoff((request.abort.request_id, request.abort.attempt))
                    response.abort.SetInParent()
                case _:
                    raise HandoffError("this decode worker does not know that call")
        except Exception as failure:
            _refuse(response, failure)
        return response

    async def _commit_in_time(self, request: Request) -> None:
        response, commit = Response(call=request.call), request.commit
        try:
            async with asyncio.timeout(request.timeout_ms / 1000):
                firsts = convert.first_tokens_from_proto(commit)
                response.commit.bytes = await self._role.commit_when_complete(
                    commit.ticket_id, commit.writer, firsts
                )
        except TimeoutError:
            _refuse(response, DeadlineExceeded("the blocks or the grammar were not ready in time"))
        except Exception as failure:
            _refuse(response, failure)
        await self._write(response)

    def _request(self, request: decode_pb2.ReserveRequest) -> asyncio.Future[Ticket]:
        return self._role.request_reserve(
            Offer(
                fingerprint=request.fingerprint,
                geometry=convert.geometry_from_proto(request.geometry),
                incarnation=request.incarnation,
                writer=request.writer,
                spec=convert.sequence_from_proto(request.sequence),
            )
        )

    def _promise(self, ticket: Ticket, answer: decode_pb2.ReserveResponse) -> None:
        answer.ticket_id = ticket.ticket_id
        answer.pinned_blocks = len(ticket.pinned)
        answer.missing_blocks = len(ticket.missing)
        answer.lease_ms = int(ticket.lease_s * 1000)
        answer.without_drafter = not self._role.context.engine.runner.takes_prompt()


def _refuse(response: Response, failure: Exception) -> None:
    error = as_baton_error(failure)
    response.error.code = error.code or ""
    response.error.message = error.message
    if error.retry_after is not None:
        response.error.retry_after_ms = int(error.retry_after * 1000)
