"""A writer's calls, as a real decode role answers them on a stream of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast
from unittest.mock import Mock

import pytest

from baton.errors import Unavailable
from baton.request import LoadSnapshot, SequenceSpec
from baton.rpc import convert
from baton.sampling_params import SamplingParams
from baton.v1 import decode_pb2
from decode_worker.service import HandoffsContext, HandoffStream
from tests.support.decode_worker.decode_worker_role import (
    BLOCK_BYTES,
    GEOMETRY,
    ROUTER,
    World,
    token,
)

Request = decode_pb2.HandoffsRequest
Response = decode_pb2.HandoffsResponse

DEADLINE_S = 20.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which a router reads."""
    world = World(monkeypatch)
    world.role.sequences.outbox(ROUTER).open()
    return world


class Stream:
    """Both ends of one."""

    def __init__(self, world: World) -> None:
        self.answers: asyncio.Queue[Response] = asyncio.Queue()
        self.writing = 0
        self._requests: asyncio.Queue[Request | None] = asyncio.Queue()
        context = cast(HandoffsContext, self)
        self.served = asyncio.ensure_future(
            HandoffStream(world.role, context).run(self._each_request())
        )

    async def _each_request(self) -> AsyncIterator[Request]:
        while (request := await self._requests.get()) is not None:
            yield request

    async def write(self, response: Response) -> None:
        """As a servicer's context: gRPC allows one at a time."""
        self.writing += 1
        assert self.writing == 1, "two answers are written at once"
        await asyncio.sleep(0)
        self.writing -= 1
        self.answers.put_nowait(response)

    def ask(self, *requests: Request) -> None:
        for request in requests:
            self._requests.put_nowait(request)

    async def told(self) -> Response:
        async with asyncio.timeout(DEADLINE_S):
            return await self.answers.get()

    async def leave(self) -> None:
        """The writer has gone."""
        self._requests.put_nowait(None)
        async with asyncio.timeout(DEADLINE_S):
            await self.served


def reserve(
    call: int,
    request: str = "r",
    length: int = 6,
    fingerprint: str = "model",
    timeout_ms: int = 60_000,
) -> Request:
    spec = SequenceSpec(
        request, 0, ROUTER, tuple(range(length)), length, SamplingParams(max_tokens=20)
    )
    offer = decode_pb2.ReserveRequest(
        fingerprint=fingerprint,
        geometry=convert.geometry_to_proto(GEOMETRY),
        incarnation="decode-0:1",
        writer="writer",
        sequence=convert.sequence_to_proto(spec),
    )
    return Request(call=call, timeout_ms=timeout_ms, reserve=offer)


def commit(call: int, ticket_id: str, timeout_ms: int = 60_000) -> Request:
    message = decode_pb2.CommitRequest(ticket_id=ticket_id, writer="writer", first_token=7)
    return Request(call=call, timeout_ms=timeout_ms, commit=message)


def abort(call: int, request: str = "r") -> Request:
    return Request(call=call, abort=decode_pb2.AbortRequest(request_id=request))


async def reserved(stream: Stream, request: str = "r") -> str:
    stream.ask(reserve(1, request))
    answer = await stream.told()
    assert answer.call == 1
    assert (answer.reserve.pinned_blocks, answer.reserve.missing_blocks) == (0, 2)
    assert answer.reserve.lease_ms == 3000
    return answer.reserve.ticket_id


async def test_a_handoff(world: World) -> None:
    stream = Stream(world)
    ticket_id = await reserved(stream)
    world.receive(ticket_id)
    stream.ask(commit(2, ticket_id))
    assert await stream.told() == Response(
        call=2, commit=decode_pb2.CommitResponse(bytes=2 * BLOCK_BYTES)
    )
    assert world.told() == [token(0, 7)]
    # What was committed runs on.
    stream.ask(abort(3))
    assert await stream.told() == Response(call=3, abort=decode_pb2.AbortResponse())
    assert not world.core.scheduler.is_idle()
    await stream.leave()
    world.role.abort(("r", 0))
    world.check_nothing_is_held()


async def test_a_commit_that_waits_delays_no_other(world: World) -> None:
    stream = Stream(world)
    first, second = await reserved(stream, "first"), await reserved(stream, "second")
    stream.ask(commit(2, first), commit(3, second), abort(4, "other"))
    assert (await stream.told()).call == 4
    world.receive(second)
    world.receive(first)
    assert sorted([(await stream.told()).call, (await stream.told()).call]) == [2, 3]
    assert {output.request_id for output in world.told()} == {"first", "second"}
    await stream.leave()
    for request in ("first", "second"):
        world.role.abort((request, 0))
    world.check_nothing_is_held()


async def test_a_commit_waits_no_longer_than_it_has_time(world: World) -> None:
    stream = Stream(world)
    ticket_id = await reserved(stream)
    stream.ask(commit(2, ticket_id, timeout_ms=20))
    answer = await stream.told()
    assert (answer.call, answer.error.code) == (2, "deadline_exceeded")
    world.receive(ticket_id)
    assert world.told() == [], "it was given up"
    stream.ask(abort(3))
    await stream.told()
    await stream.leave()
    world.check_nothing_is_held()


async def test_a_commit_that_waits_ends_with_its_stream_and_its_ticket_does_not(
    world: World,
) -> None:
    stream = Stream(world)
    ticket_id = await reserved(stream)
    stream.ask(commit(2, ticket_id), abort(3, "other"))
    await stream.told()
    await stream.leave()
    world.receive(ticket_id)
    assert world.told() == []
    again = Stream(world)
    again.ask(commit(1, ticket_id))
    assert (await again.told()).HasField("commit")
    await again.leave()
    world.role.abort(("r", 0))
    world.check_nothing_is_held()


async def test_an_abort_ends_the_commit_that_waits(world: World) -> None:
    stream = Stream(world)
    ticket_id = await reserved(stream)
    stream.ask(commit(2, ticket_id), abort(3))
    answers = {answer.call: answer for answer in (await stream.told(), await stream.told())}
    assert answers[2].error.code == "handoff_ticket_ended"
    assert answers[3].HasField("abort")
    await stream.leave()
    world.check_nothing_is_held()


async def test_refusals_say_why_and_the_stream_goes_on(world: World) -> None:
    stream = Stream(world)
    stream.ask(reserve(1, fingerprint="another"))
    assert (await stream.told()).error.code == "handoff_fingerprint_mismatch"
    stream.ask(commit(2, "unknown"))
    assert (await stream.told()).error.code == "handoff_ticket_ended"
    stream.ask(Request(call=3))
    assert (await stream.told()).error.code == "handoff_failed"
    await stream.leave()
    world.check_nothing_is_held()


# Reserves without room


async def full(world: World) -> Stream:
    """A stream to a worker whose blocks are all promised, to ``r0`` and ``r1``."""
    stream = Stream(world)
    stream.ask(reserve(1, "r0", length=60), reserve(2, "r1", length=60))
    for _ in range(2):
        assert (await stream.told()).HasField("reserve")
    return stream


def granted(world: World) -> list[str]:
    """Requests in the grants that the router receives."""
    return [request for request, _ in world.role.sequences.outbox(ROUTER).take().granted]


async def test_a_reserve_without_room_is_refused_at_once_with_the_load(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    stream = await full(world)
    monkeypatch.setattr(world.core, "load", lambda: LoadSnapshot(running=3, free_blocks=2))
    stream.ask(reserve(3, "late", length=60))
    error = (await stream.told()).error
    assert error.code == "no_decode_room"
    assert (error.load.running, error.load.free_blocks) == (3, 2)
    await end_all(world, stream)


async def test_a_router_gets_a_grant_at_a_refused_requests_turn(world: World) -> None:
    stream = await full(world)
    stream.ask(reserve(3, "large", length=60))
    assert (await stream.told()).error.code == "no_decode_room"
    assert granted(world) == []
    stream.ask(abort(4, "r0"))
    await stream.told()
    await asyncio.sleep(0)
    assert granted(world) == ["large"]
    stream.ask(reserve(5, "another", length=60))
    assert (await stream.told()).reserve.missing_blocks == 15, "any request of the router may go"
    await end_all(world, stream, "another")


async def test_an_abort_gives_the_turn_up(world: World) -> None:
    stream = await full(world)
    stream.ask(reserve(3, "late", length=60))
    await stream.told()
    world.role.abort(("late", 0))
    stream.ask(reserve(4, "late", length=60))
    assert (await stream.told()).error.code == "handoff_ticket_ended", "it is over for good"
    await end_all(world, stream)
    assert granted(world) == []


async def test_a_worker_that_drains_gives_no_ticket_and_grants_no_room(world: World) -> None:
    stream = await full(world)
    stream.ask(reserve(3, "late", length=60))
    await stream.told()
    world.role.context.intake.close()
    await world.role.heartbeat()
    for request in ("r0", "r1"):
        world.role.abort((request, 0))
    await asyncio.sleep(0)
    assert granted(world) == []
    stream.ask(reserve(4, "new"))
    assert "is draining" in (await stream.told()).error.message
    await stream.leave()
    world.check_nothing_is_held()


async def end_all(world: World, stream: Stream, *others: str) -> None:
    for request in ("r0", "r1", *others):
        world.role.abort((request, 0))
    await asyncio.sleep(0)
    await stream.leave()
    world.check_nothing_is_held()


async def test_a_refused_prompt_is_not_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Mock(side_effect=AssertionError("the prompt is read"))
    stream = Stream(world)
    stream.ask(*(reserve(n, f"r{n}", length=4) for n in range(1, 9)))
    for _ in range(8):
        assert (await stream.told()).HasField("reserve")
    monkeypatch.setattr(convert, "sequence_from_proto", read)
    stream.ask(reserve(9, "late", length=60))
    assert (await stream.told()).error.code == "no_decode_room"
    monkeypatch.undo()
    await end_all(world, stream, *(f"r{n}" for n in range(2, 9)))


async def test_an_unexpected_error_reveals_only_its_kind(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret")

    stream = Stream(world)
    monkeypatch.setattr(world.role, "abort_handoff", fail)
    stream.ask(abort(1))
    answer = await stream.told()
    assert answer.error.code == "internal_error"
    assert answer.error.message == "internal error: RuntimeError"
    await stream.leave()


async def test_a_worker_that_stops_ends_its_streams(world: World) -> None:
    stream = Stream(world)
    stream.ask(commit(2, await reserved(stream)))
    await world.role.close()
    with pytest.raises(Unavailable, match="is stopping"):
        await asyncio.wait_for(stream.served, DEADLINE_S)
    with pytest.raises(Unavailable, match="is stopping"):
        await asyncio.wait_for(Stream(world).served, DEADLINE_S)
    world.check_nothing_is_held()
