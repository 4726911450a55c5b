"""The router's end of a stream of prefills: what breaks fails what is on it, and no more."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager

import grpc
import grpc.aio
import pytest

from baton.errors import BatonError, WorkerFailed
from baton.rpc.grpc_channel import MESSAGE_LIMIT, make_server, open_channel
from baton.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2
from router.workers.worker_link import PrefillStream

DEADLINE_S = 20.0

Context = grpc.aio.ServicerContext[object, object]


class Worker(prefill_pb2_grpc.PrefillServiceServicer):
    """Says what a test puts into its mouth; None ends the stream, a status breaks it."""

    def __init__(self) -> None:
        self.heard: list[prefill_pb2.PrefillCommand] = []
        self.messages = 0
        self.streams = 0
        self.says: asyncio.Queue[prefill_pb2.PrefillsResponse | grpc.StatusCode | None] = (
            asyncio.Queue()
        )

    async def Prefills(  # noqa: N802 - gRPC's name
        self, request_iterator: AsyncIterator[prefill_pb2.PrefillsRequest], context: Context
    ) -> AsyncIterator[prefill_pb2.PrefillsResponse]:
        self.streams += 1
        reading = asyncio.create_task(self._read(request_iterator))
        try:
            while (said := await self.says.get()) is not None:
                if isinstance(said, grpc.StatusCode):
                    await context.abort(said, "told to")
                else:
                    yield said
        finally:
            reading.cancel()

    async def _read(self, messages: AsyncIterator[prefill_pb2.PrefillsRequest]) -> None:
        async for message in messages:
            self.messages += 1
            self.heard += message.commands

    def tell(self, *events: prefill_pb2.PrefillEvent) -> None:
        self.says.put_nowait(prefill_pb2.PrefillsResponse(events=events))


def token_event(name: str, attempt: int = 0) -> prefill_pb2.PrefillEvent:
    output = worker_pb2.TokenOutput(request_id=name, attempt=attempt, token_ids=[7])
    response = prefill_pb2.PrefillResponse(first_token=output)
    return prefill_pb2.PrefillEvent(request_id=name, attempt=attempt, response=response)


def end_event(name: str, attempt: int = 0) -> prefill_pb2.PrefillEvent:
    end = prefill_pb2.PrefillEnd()
    return prefill_pb2.PrefillEvent(request_id=name, attempt=attempt, end=end)


@asynccontextmanager
async def open_stream() -> AsyncIterator[tuple[Worker, PrefillStream]]:
    server, worker = make_server(), Worker()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(worker, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stream = PrefillStream(channel, "prefill-0")
            try:
                yield worker, stream
            finally:
                await stream.close()
    finally:
        await server.stop(None)


async def follow(stream: PrefillStream, name: str, attempt: int = 0) -> int:
    """How many events came before the end."""
    sequence = worker_pb2.SequenceSpec(request_id=name, attempt=attempt)
    request = prefill_pb2.PrefillRequest(sequence=sequence)
    async with asyncio.timeout(DEADLINE_S), aclosing(stream.run(request)) as responses:
        return len([response async for response in responses])


async def heard(worker: Worker, count: int) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while len(worker.heard) < count:
            await asyncio.sleep(0.002)


async def test_what_is_asked_at_a_time_goes_in_one_message() -> None:
    async with open_stream() as (worker, stream):
        follows = [asyncio.create_task(follow(stream, str(name))) for name in range(20)]
        await heard(worker, 20)
        assert worker.messages == 1
        worker.tell(*(event(str(name)) for name in range(20) for event in (token_event, end_event)))
        assert await asyncio.gather(*follows) == [1] * 20
        assert worker.streams == 1


async def test_what_is_too_much_for_one_message_goes_in_several() -> None:
    """Long prompts have gathered behind a worker that stood still."""
    async with open_stream() as (worker, stream):
        sequence = worker_pb2.SequenceSpec(cache_salt=bytes(3 << 20))
        count = 1 + MESSAGE_LIMIT // len(sequence.cache_salt)

        async def run(name: str) -> None:
            sequence.request_id = name
            request = prefill_pb2.PrefillRequest(sequence=sequence)
            async with asyncio.timeout(DEADLINE_S), aclosing(stream.run(request)) as responses:
                assert [response async for response in responses] == []

        runs = [asyncio.create_task(run(str(name))) for name in range(count)]
        await heard(worker, count)
        names = [command.start.sequence.request_id for command in worker.heard]
        assert names == [str(name) for name in range(count)]
        worker.tell(*(end_event(str(name)) for name in range(count)))
        await asyncio.gather(*runs)
        assert worker.streams == 1


async def test_events_of_others_and_of_old_attempts_are_dropped() -> None:
    async with open_stream() as (worker, stream):
        following = asyncio.create_task(follow(stream, "a", 1))
        await heard(worker, 1)
        worker.tell(token_event("a", 0), end_event("a", 0), token_event("b"), token_event("a", 1))
        worker.tell(end_event("a", 1))
        assert await following == 1


async def test_one_that_has_ended_is_not_cancelled_and_one_that_is_left_is() -> None:
    async with open_stream() as (worker, stream):
        following = asyncio.create_task(follow(stream, "a"))
        await heard(worker, 1)
        worker.tell(end_event("a"))
        await following
        leaving = asyncio.create_task(follow(stream, "b"))
        await heard(worker, 2)
        leaving.cancel()
        await asyncio.wait([leaving])
        await heard(worker, 3)
        assert [command.WhichOneof("command") for command in worker.heard] == [
            *("start", "start", "cancel")
        ]
        assert worker.heard[2].cancel.request_id == "b"


@pytest.mark.parametrize("how", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, None])
async def test_a_broken_stream_fails_all_and_the_next_opens_another(
    how: grpc.StatusCode | None,
) -> None:
    async with open_stream() as (worker, stream):
        follows = [asyncio.create_task(follow(stream, name)) for name in "ab"]
        await heard(worker, 2)
        worker.says.put_nowait(how)
        for following in follows:
            with pytest.raises(WorkerFailed, match="prefill-0"):
                await following
        again = asyncio.create_task(follow(stream, "c"))
        await heard(worker, 3)
        assert worker.streams == 2
        assert worker.heard[2].start.sequence.request_id == "c", "nothing old is sent again"
        worker.tell(end_event("c"))
        assert await again == 0


async def test_a_worker_that_is_gone_fails_at_once() -> None:
    async with open_channel("127.0.0.1:1") as channel:
        stream = PrefillStream(channel, "prefill-0")
        with pytest.raises(BatonError) as caught:
            await follow(stream, "a")
        assert type(caught.value) is WorkerFailed
        await stream.close()


async def test_closing_fails_what_waits_and_what_comes() -> None:
    async with open_stream() as (worker, stream):
        following = asyncio.create_task(follow(stream, "a"))
        await heard(worker, 1)
        await stream.close()
        with pytest.raises(WorkerFailed):
            await following
        with pytest.raises(WorkerFailed):
            await follow(stream, "b")
        await stream.close()
