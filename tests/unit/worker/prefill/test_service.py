"""One stream for all prefills of a router: a scripted runner, real gRPC, the router's own end."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

import pytest

from baton.errors import BatonError, NoRoom, WorkerFailed
from baton.request import LoadSnapshot
from baton.rpc import convert
from baton.rpc.grpc_channel import make_server, open_channel
from baton.telemetry.logs import Service, formatter
from baton.v1 import prefill_pb2, prefill_pb2_grpc, worker_pb2
from router.workers.worker_link import PrefillStream
from worker.prefill import service
from worker.prefill.service import PrefillServicer, Send
from worker.services import Keepalive

DEADLINE_S = 20.0


class Prompts:
    """A worker whose prefills do what the test says, and which knows what became of them."""

    def __init__(self) -> None:
        self.servicer = PrefillServicer(
            self.run, lambda: LoadSnapshot("p", running=3), Keepalive(busy_s=0.01, idle_s=5.0)
        )
        self.going_on = asyncio.Event()
        self.begun: list[str] = []
        self.aborted: list[str] = []
        self.error: Exception | None = None
        self.log = logging.getLogger("tests.prompts")

    async def run(self, request: prefill_pb2.PrefillRequest, send: Send) -> None:
        """Send a first token, wait to be let go on, send the handoff or fail."""
        name = request.sequence.request_id
        self.begun.append(name)
        self.log.info("begun")
        try:
            output = worker_pb2.TokenOutput(request_id=name, token_ids=[7])
            send(prefill_pb2.PrefillResponse(first_token=output))
            await self.going_on.wait()
            if self.error is not None:
                raise self.error
            send(prefill_pb2.PrefillResponse(handoff=prefill_pb2.HandoffCommitted(bytes=9)))
        except asyncio.CancelledError:
            self.aborted.append(name)
            raise


class World:
    """The worker, and a router's stream to it."""

    def __init__(self, prompts: Prompts, stream: PrefillStream) -> None:
        self.prompts = prompts
        self.stream = stream

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(DEADLINE_S):
            while not condition():
                await asyncio.sleep(0.002)


@asynccontextmanager
async def open_world() -> AsyncIterator[World]:
    server, prompts = make_server(), Prompts()
    prefill_pb2_grpc.add_PrefillServiceServicer_to_server(prompts.servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with open_channel(f"127.0.0.1:{port}") as channel:
            stream = PrefillStream(channel, "prefill-0")
            try:
                yield World(prompts, stream)
            finally:
                await stream.close()
    finally:
        await server.stop(None)


def request_of(name: str, attempt: int = 0) -> prefill_pb2.PrefillRequest:
    sequence = worker_pb2.SequenceSpec(request_id=name, attempt=attempt)
    return prefill_pb2.PrefillRequest(sequence=sequence)


async def follow(stream: PrefillStream, request: prefill_pb2.PrefillRequest) -> list[str | None]:
    """The kinds of a prefill's events."""
    async with asyncio.timeout(DEADLINE_S), aclosing(stream.run(request)) as responses:
        return [response.WhichOneof("event") async for response in responses]


async def test_prefills_run_side_by_side_and_each_hears_its_own() -> None:
    async with open_world() as world:
        first, second = (world.stream.run(request_of(name)) for name in ("a", "b"))
        async with aclosing(first), aclosing(second), asyncio.timeout(DEADLINE_S):
            assert (await anext(first)).first_token.request_id == "a"
            assert (await anext(second)).first_token.request_id == "b"
            world.prompts.going_on.set()
            assert (await anext(second)).handoff.bytes == 9
            assert (await anext(first)).handoff.bytes == 9
            for prefill in (first, second):
                with pytest.raises(StopAsyncIteration):
                    await anext(prefill)
        assert world.prompts.aborted == []


@pytest.mark.parametrize(
    ("error", "kind", "retry_after"),
    [
        (NoRoom("no room", retry_after=1.5), NoRoom, 1.5),
        (BatonError("broken"), BatonError, None),
        (ValueError("a secret prompt"), BatonError, None),
        (OSError(errno.EMFILE, "a secret path"), WorkerFailed, 1.0),
        (MemoryError("a secret prompt"), WorkerFailed, 1.0),
    ],
)
async def test_a_failure_is_that_prefills_alone(
    error: Exception, kind: type[BatonError], retry_after: float | None
) -> None:
    async with open_world() as world:
        world.prompts.error = error
        world.prompts.going_on.set()
        with pytest.raises(BatonError) as caught:
            await follow(world.stream, request_of("a"))
        assert type(caught.value) is kind
        assert caught.value.retry_after == retry_after
        assert "secret" not in caught.value.message
        world.prompts.error = None
        assert await follow(world.stream, request_of("a", 1)) == ["first_token", "handoff"]


async def test_lines_of_a_prefill_have_its_ids() -> None:
    written = io.StringIO()
    handler = logging.StreamHandler(written)
    handler.setFormatter(formatter("json", Service.WORKER, "prefill-0"))
    logger = logging.Logger("own")
    logger.addHandler(handler)
    trace = "0af7651916cd43dd8448eb211c80319c"
    async with open_world() as world:
        world.prompts.log = logger
        world.prompts.going_on.set()
        first, second = request_of("a"), request_of("b")
        first.sequence.trace.traceparent = f"00-{trace}-b7ad6b7169203331-01"
        await follow(world.stream, first)
        await follow(world.stream, second)
    rows = [json.loads(line) for line in written.getvalue().splitlines()]
    assert [(row["answer_id"], row.get("trace_id")) for row in rows] == [("a", trace), ("b", None)]


async def test_closing_the_iterator_aborts_it_there_and_nothing_else() -> None:
    async with open_world() as world:
        kept, left = (world.stream.run(request_of(name)) for name in ("kept", "left"))
        async with aclosing(kept), asyncio.timeout(DEADLINE_S):
            await anext(kept)
            await anext(left)
            await left.aclose()
            await world.until(lambda: world.prompts.aborted == ["left"])
            world.prompts.going_on.set()
            assert (await anext(kept)).HasField("handoff")


async def test_one_that_is_cancelled_before_it_was_sent_is_not_left_running() -> None:
    async with open_world() as world:
        following = asyncio.create_task(follow(world.stream, request_of("a")))
        await asyncio.sleep(0)
        following.cancel()
        await asyncio.wait([following])
        world.prompts.going_on.set()
        assert await follow(world.stream, request_of("b")) == ["first_token", "handoff"]
        await world.until(lambda: world.prompts.begun == [*world.prompts.aborted, "b"])


async def test_a_prefill_that_is_started_twice_runs_once() -> None:
    async with open_world() as world:
        stream = world.stream
        async with aclosing(stream.run(request_of("a"))) as first, asyncio.timeout(DEADLINE_S):
            await anext(first)
            again = asyncio.create_task(follow(stream, request_of("a")))
            assert await follow_nothing(world)
            again.cancel()
            await asyncio.wait([again])
        assert world.prompts.begun.count("a") == 1


async def follow_nothing(world: World) -> bool:
    """Whatever was commanded before has been heard there."""
    async with aclosing(world.stream.run(request_of("last"))) as last:
        return bool(await anext(last))


async def test_a_router_that_goes_away_aborts_all_it_has_started() -> None:
    async with open_world() as world:
        follows = [
            asyncio.create_task(follow(world.stream, request_of(name))) for name in ("a", "b")
        ]
        await world.until(lambda: len(world.prompts.begun) == 2)
        await world.stream.close()
        for following in follows:
            with pytest.raises(WorkerFailed):
                await following
        await world.until(lambda: sorted(world.prompts.aborted) == ["a", "b"])
        with pytest.raises(WorkerFailed):
            await follow(world.stream, request_of("c"))


async def test_a_worker_that_stops_tells_how_its_prefills_end_first() -> None:
    async with open_world() as world:
        following = asyncio.create_task(follow(world.stream, request_of("a")))
        await world.until(lambda: world.prompts.begun)
        world.prompts.servicer.close()
        world.prompts.error = NoRoom("the worker is stopping")
        world.prompts.going_on.set()
        with pytest.raises(NoRoom):
            await following


async def test_a_worker_that_stops_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(service, "CLOSE_S", 0.05)
    async with open_world() as world:
        following = asyncio.create_task(follow(world.stream, request_of("a")))
        await world.until(lambda: world.prompts.begun)
        world.prompts.servicer.close()
        with pytest.raises(WorkerFailed, match="prefill-0"):
            await following
        assert world.prompts.aborted == ["a"]


async def test_a_worker_says_that_it_lives_while_it_has_something_to_do() -> None:
    async with open_world() as world:
        prefill = world.stream.run(request_of("a"))
        async with aclosing(prefill), asyncio.timeout(DEADLINE_S):
            await anext(prefill)
            heard = world.stream.messages
            await world.until(lambda: world.stream.messages >= heard + 3)
            world.prompts.going_on.set()
            assert (await anext(prefill)).handoff.bytes == 9


async def test_what_a_worker_says_has_what_it_does() -> None:
    async with open_world() as world:
        prefill = world.stream.run(request_of("a"))
        async with aclosing(prefill), asyncio.timeout(DEADLINE_S):
            await anext(prefill)
            assert world.stream.load is not None
            assert convert.load_from_proto(world.stream.load) == LoadSnapshot("p", running=3)


async def test_a_stream_that_ends_with_prefills_on_it_has_broken() -> None:
    async with open_world() as world:
        assert await follow_quickly(world) == ["first_token", "handoff"]
        assert world.stream.breaks == 0
        world.prompts.going_on.clear()
        prefill = world.stream.run(request_of("b"))
        async with aclosing(prefill), asyncio.timeout(DEADLINE_S):
            await anext(prefill)
            assert world.stream._life is not None
            world.stream._life.cancel()
            with pytest.raises(WorkerFailed):
                await anext(prefill)
        assert world.stream.breaks == 1


async def follow_quickly(world: World) -> list[str | None]:
    world.prompts.going_on.set()
    return await follow(world.stream, request_of("a"))
