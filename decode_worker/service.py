"""DecodeService: receives handoffs, and sends tokens to the routers.

A writer has one stream for its calls:

    open ─the writer leaves, the worker stops→ ended

A commit waits for bytes and for its grammar. A reserve waits for the other ranks of this worker,
and is refused at once if there is no room. Other calls continue meanwhile. Calls that still wait
when the stream ends are given up. Owned by the worker's event loop.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence

import grpc.aio

from baton.errors import DeadlineExceeded, HandoffError, NoRoom
from baton.host.background import end_tasks
from baton.request import AttemptName, PackedTokens
from baton.rpc import convert
from baton.rpc.grpc_channel import by_size
from baton.rpc.grpc_errors import as_baton_error, grpc_boundary, guarded
from baton.v1 import decode_pb2, decode_pb2_grpc, worker_pb2
from decode_worker.receiver import Offer
from decode_worker.requests import DecodeRequests, stopping
from decode_worker.sequences import Unsent
from kvtransfer.tickets import Ticket

Context = grpc.aio.ServicerContext[object, object]
Request = decode_pb2.HandoffsRequest
Response = decode_pb2.HandoffsResponse
HandoffsContext = grpc.aio.ServicerContext[Request, Response]


class DecodeServicer(decode_pb2_grpc.DecodeServiceServicer):
    """Implements DecodeService: translates messages into calls of ``DecodeRequests``."""

    def __init__(self, requests: DecodeRequests) -> None:
        self._requests = requests

    async def Handoffs(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self,
        request_iterator: AsyncIterator[Request],
        context: HandoffsContext,
    ) -> None:
        """Answer a writer's stream of calls: reserves, commits and aborts. See decode.proto."""
        async with grpc_boundary(context):  # type: ignore[arg-type]
            await HandoffStream(self._requests, context).run(request_iterator)

    @guarded
    async def Abort(  # noqa: N802
        self, request: decode_pb2.AbortRequest, context: Context
    ) -> decode_pb2.AbortResponse:
        """End a request, or one of its choices, for its router. See decode.proto."""
        choice = request.choice if request.HasField("choice") else None
        self._requests.abort((request.request_id, request.attempt), choice)
        return decode_pb2.AbortResponse()

    async def StreamTokens(  # noqa: N802
        self, request: decode_pb2.StreamTokensRequest, context: Context
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        """Send a router the tokens of its sequences; see decode.proto.

        A message without tokens shows that the worker is alive.
        """
        requests = self._requests
        outbox = requests.sequences.outbox(request.router_id)
        reader = outbox.open()
        try:
            yield self._message()
            outbox.knows_full = requests.is_full
            while not requests.closing.is_set():
                busy = requests.has_work_of(request.router_id)
                await outbox.wait(requests.keepalive.next_s(busy=busy))
                if not outbox.is_current(reader):
                    return
                outbox.knows_full = requests.is_full
                for message in self._messages(outbox.take()):
                    yield message
            for message in self._messages(outbox.take()):
                yield message
        finally:
            outbox.close(reader, requests.clock())

    def _messages(self, unsent: Unsent) -> Iterator[decode_pb2.StreamTokensResponse]:
        """Yield messages that contain what was not sent. At least one message is sent, because it
        shows that the worker is alive."""
        *full, last = unsent.tokens or [PackedTokens()]
        for tokens in full:
            yield self._message(tokens)
        parts = by_size(map(convert.output_to_proto, unsent.outputs))
        yield self._message(last, next(parts, ()), unsent.granted)
        for some in parts:
            yield self._message(outputs=some)

    def _message(
        self,
        tokens: PackedTokens | None = None,
        outputs: Sequence[worker_pb2.TokenOutput] = (),
        granted: Sequence[AttemptName] = (),
    ) -> decode_pb2.StreamTokensResponse:
        return decode_pb2.StreamTokensResponse(
            granted=[
                decode_pb2.GrantedRoom(request_id=request_id, attempt=attempt)
                for request_id, attempt in granted
            ],
            outputs=outputs,
            load=convert.load_to_proto(self._requests.context.core.load()),
            tokens=convert.tokens_to_proto(tokens) if tokens and tokens.numbers else None,
        )


class HandoffStream:
    """The calls of one writer on one stream, answered in any order."""

    def __init__(self, requests: DecodeRequests, context: HandoffsContext) -> None:
        self._requests = requests
        self._context = context
        self._waiting: set[asyncio.Task[None]] = set()
        self._turn = asyncio.Lock()
        """Lock that is held while an answer is written to the stream."""

    async def run(self, calls: AsyncIterator[Request]) -> None:
        """Answer the writer's calls until it leaves. Raises Unavailable if the worker stops."""
        if self._requests.closing.is_set():
            raise stopping()
        reading = asyncio.create_task(self._read(calls), name="handoffs-read")
        closing = asyncio.create_task(self._requests.closing.wait(), name="handoffs-close")
        try:
            await asyncio.wait([reading, closing], return_when=asyncio.FIRST_COMPLETED)
            if self._requests.closing.is_set():
                raise stopping()
            reading.result()
        finally:
            await end_tasks([reading, closing, *self._waiting])

    async def _read(self, calls: AsyncIterator[Request]) -> None:
        async for request in calls:
            if request.HasField("commit") and self._requests.must_wait(request.commit.ticket_id):
                commit = asyncio.create_task(self._commit_in_time(request), name="commit")
                self._waiting.add(commit)
                commit.add_done_callback(self._waiting.discard)
                continue
            if request.HasField("reserve"):
                # The blocks are reserved at once: the next message may be the abort.
                await self._reserve(request)
            else:
                await self._write(self._answer(request))

    async def _reserve(self, request: Request) -> None:
        response = Response(call=request.call)
        try:
            ticket = self._requests.reserve(self._offer_of(request.reserve))
        except Exception as failure:
            _refuse(response, failure)
            await self._write(response)
            return
        if self._requests.receiver.blocks.opened(ticket.ticket_id) is None:
            self._promise(ticket, response.reserve)
            await self._write(response)
            return
        answer = asyncio.create_task(self._reserve_in_time(request, ticket), name="reserve")
        self._waiting.add(answer)
        answer.add_done_callback(self._waiting.discard)

    async def _reserve_in_time(self, request: Request, ticket: Ticket) -> None:
        """Answer a reserve once all ranks of this worker accept the writer's data."""
        response = Response(call=request.call)
        try:
            async with asyncio.timeout(request.timeout_ms / 1000):
                opened = self._requests.receiver.blocks.opened(ticket.ticket_id)
                if opened is not None:
                    # Another call may wait for the same ticket.
                    await asyncio.shield(opened)
            self._promise(ticket, response.reserve)
        except TimeoutError:
            _refuse(response, DeadlineExceeded("the ranks of this worker were not ready in time"))
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
                    response.commit.bytes = self._requests.commit(
                        commit.ticket_id, commit.writer, firsts
                    )
                case "abort":
                    self._requests.abort_handoff((request.abort.request_id, request.abort.attempt))
                    response.abort.SetInParent()
                case _:
                    raise HandoffError("this decode worker does not know the call")
        except Exception as failure:
            _refuse(response, failure)
        return response

    async def _commit_in_time(self, request: Request) -> None:
        response, commit = Response(call=request.call), request.commit
        try:
            async with asyncio.timeout(request.timeout_ms / 1000):
                firsts = convert.first_tokens_from_proto(commit)
                response.commit.bytes = await self._requests.commit_when_complete(
                    commit.ticket_id, commit.writer, firsts
                )
        except TimeoutError:
            _refuse(response, DeadlineExceeded("the blocks or the grammar were not ready in time"))
        except Exception as failure:
            _refuse(response, failure)
        await self._write(response)

    def _offer_of(self, request: decode_pb2.ReserveRequest) -> Offer:
        """Read an offer. Raises what ``DecodeRequests.check_new`` raises."""
        self._requests.check_new(request.sequence)
        return Offer(
            fingerprint=request.fingerprint,
            geometry=convert.geometry_from_proto(request.geometry),
            incarnation=request.incarnation,
            writer=request.writer,
            spec=convert.sequence_from_proto(request.sequence),
        )

    def _promise(self, ticket: Ticket, answer: decode_pb2.ReserveResponse) -> None:
        answer.ticket_id = ticket.ticket_id
        answer.pinned_blocks = len(ticket.pinned)
        answer.missing_blocks = len(ticket.missing)
        answer.lease_ms = int(ticket.lease_s * 1000)
        answer.without_drafter = not self._requests.context.engine.runner.takes_prompt()


def _refuse(response: Response, failure: Exception) -> None:
    error = as_baton_error(failure)
    response.error.code = error.code or ""
    response.error.message = error.message
    if error.retry_after is not None:
        response.error.retry_after_ms = int(error.retry_after * 1000)
    if isinstance(error, NoRoom) and error.load is not None:
        response.error.load.CopyFrom(convert.load_to_proto(error.load))
