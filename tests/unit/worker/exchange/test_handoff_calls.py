"""A writer's calls against a server that answers by the test's hand."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from typing import TypeVar

import grpc
import grpc.aio
import pytest
from google.protobuf.message import DecodeError

from baton.errors import DeadlineExceeded, HandoffError, NoRoom, WorkerFailed
from baton.rpc.grpc_channel import make_server, open_channel
from baton.v1 import decode_pb2, decode_pb2_grpc
from worker.exchange.handoff_calls import HandoffCalls

Request = decode_pb2.HandoffsRequest
Response = decode_pb2.HandoffsResponse
Context = grpc.aio.ServicerContext[Request, Response]
R = TypeVar("R")

DEADLINE_S = 20.0


async def soon(awaitable: Awaitable[R]) -> R:
    async with asyncio.timeout(DEADLINE_S):
        return await awaitable


class Decode(decode_pb2_grpc.DecodeServiceServicer):
    """Streams end when ``ending`` is set."""

    def __init__(self) -> None:
        self.streams = 0
        self.ended = 0
        self.requests: asyncio.Queue[Request] = asyncio.Queue()
        self.ending = asyncio.Event()
        self._context: Context

    async def Handoffs(  # type: ignore[override]  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[Request], context: Context
    ) -> None:
        self.streams += 1
        self._context = context
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            await self.ending.wait()
            await context.abort(grpc.StatusCode.UNAVAILABLE, "it stops")
        finally:
            reading.cancel()
            self.ended += 1

    async def _read(self, requests: AsyncIterator[Request]) -> None:
        async for request in requests:
            self.requests.put_nowait(request)

    async def Abort(  # noqa: N802
        self, request: decode_pb2.AbortRequest, context: object
    ) -> decode_pb2.AbortResponse:
        raise NotImplementedError

    def StreamTokens(  # noqa: N802
        self, request: decode_pb2.StreamTokensRequest, context: object
    ) -> AsyncIterator[decode_pb2.StreamTokensResponse]:
        raise NotImplementedError

    async def next(self) -> Request:
        return await soon(self.requests.get())

    async def answer(self, response: Response) -> None:
        await soon(self._context.write(response))


class World:
    """A server, and a writer's calls to it."""

    def __init__(self, decode: Decode, server: grpc.aio.Server, calls: HandoffCalls) -> None:
        self.decode = decode
        self.server = server
        self.calls = calls

    def call(self, name: str, timeout_s: float = DEADLINE_S) -> asyncio.Future[Response]:
        request = Request(abort=decode_pb2.AbortRequest(request_id=name))
        return self.calls.call(request, timeout_s)

    async def served(self, name: str) -> None:
        """A whole call."""
        call = self.call(name)
        request = await self.decode.next()
        assert request.abort.request_id == name
        await self.decode.answer(done(request))
        assert (await soon(call)).HasField("abort")


def done(request: Request) -> Response:
    return Response(call=request.call, abort=decode_pb2.AbortResponse())


@pytest.fixture
async def world() -> AsyncIterator[World]:
    decode, server = Decode(), make_server()
    decode_pb2_grpc.add_DecodeServiceServicer_to_server(decode, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    channel = open_channel(f"127.0.0.1:{port}")
    calls = HandoffCalls(channel, "decode-0")
    try:
        yield World(decode, server, calls)
    finally:
        await calls.close()
        await channel.close()
        await server.stop(None)


async def test_each_call_gets_its_own_answer_in_whatever_order(world: World) -> None:
    commit = world.calls.call(
        Request(commit=decode_pb2.CommitRequest(ticket_id="t", first_token=7)), 4.5
    )
    reserve = world.calls.call(Request(reserve=decode_pb2.ReserveRequest(writer="w")), 1e9)
    first, second = await world.decode.next(), await world.decode.next()
    assert (first.commit.ticket_id, first.commit.first_token) == ("t", 7)
    assert 4000 < first.timeout_ms <= 4500
    assert second.reserve.writer == "w"
    assert second.timeout_ms == 2**32 - 1
    assert first.call != second.call
    answer = Response(call=second.call, reserve=decode_pb2.ReserveResponse(ticket_id="new"))
    await world.decode.answer(answer)
    assert (await soon(reserve)).reserve.ticket_id == "new"
    assert not commit.done()
    await world.decode.answer(Response(call=first.call, commit=decode_pb2.CommitResponse(bytes=12)))
    assert (await soon(commit)).commit.bytes == 12
    assert world.decode.streams == 1


async def test_a_refusal_is_the_error_that_was_meant(world: World) -> None:
    refused, unknown = world.call("a"), world.call("b")
    first, second = await world.decode.next(), await world.decode.next()
    error = decode_pb2.CallError(code="no_decode_room", message="full", retry_after_ms=250)
    await world.decode.answer(Response(call=first.call, error=error))
    error = decode_pb2.CallError(code="of a newer version", message="something")
    await world.decode.answer(Response(call=second.call, error=error))
    with pytest.raises(NoRoom, match="full") as caught:
        await soon(refused)
    assert caught.value.retry_after == 0.25
    with pytest.raises(HandoffError, match="something") as other:
        await soon(unknown)
    assert other.value.retry_after is None
    await world.served("after them")


async def test_a_call_that_is_not_answered_in_time_fails_alone(world: World) -> None:
    late, patient = world.call("late", 0.05), world.call("patient")
    first, second = await world.decode.next(), await world.decode.next()
    with pytest.raises(DeadlineExceeded, match="decode-0"):
        await soon(late)
    for request in (first, second, second):
        # The answer that comes late is dropped, and so is one that comes twice.
        await world.decode.answer(done(request))
    await soon(patient)
    await world.served("after them")
    assert world.decode.streams == 1


async def test_a_cancelled_call_is_forgotten(world: World) -> None:
    cancelled = asyncio.ensure_future(soon(world.call("cancelled")))
    request = await world.decode.next()
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    await world.decode.answer(done(request))
    await world.served("after it")
    assert world.decode.streams == 1


async def test_a_broken_stream_fails_what_waits_and_the_next_call_opens_another(
    world: World,
) -> None:
    calls = [world.call("a"), world.call("b")]
    for _ in calls:
        await world.decode.next()
    world.decode.ending.set()
    for call in calls:
        with pytest.raises(WorkerFailed, match="decode-0: it stops"):
            await soon(call)
    world.decode.ending.clear()
    await world.served("after it")
    assert world.decode.streams == 2


async def test_without_a_listener(world: World) -> None:
    await world.server.stop(None)
    for _ in range(2):
        with pytest.raises(WorkerFailed, match="decode-0"):
            await soon(world.call("a"))


async def test_the_server_goes_while_a_call_waits(world: World) -> None:
    call = world.call("a")
    await world.decode.next()
    await world.server.stop(None)
    with pytest.raises(WorkerFailed, match="decode-0"):
        await soon(call)


async def test_an_answer_that_cannot_be_read_ends_the_stream(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: bytes) -> Response:
        raise DecodeError("it is cut short")

    monkeypatch.setattr(Response, "FromString", fail)
    call = world.call("a")
    await world.decode.answer(done(await world.decode.next()))
    with pytest.raises(HandoffError, match="cannot be read"):
        await soon(call)
    monkeypatch.undo()
    await world.served("after it")


async def test_what_ends_the_calls_fails_those_that_wait_and_those_to_come(world: World) -> None:
    call = world.call("a")
    await world.decode.next()
    world.calls.end(WorkerFailed("the pair broke"))
    world.calls.end(WorkerFailed("again"))
    with pytest.raises(WorkerFailed, match="the pair broke"):
        await soon(call)
    with pytest.raises(WorkerFailed, match="the pair broke"):
        await world.call("b")
    async with asyncio.timeout(DEADLINE_S):
        while not world.decode.ended:
            await asyncio.sleep(0.005)
