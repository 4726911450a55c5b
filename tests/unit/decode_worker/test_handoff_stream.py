"""A writer's calls, as a real decode role answers them on a stream of the test's own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import cast

import pytest

from baton import convert
from baton.errors import Unavailable
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from baton.v1 import decode_pb2
from decode_worker.handoff_stream import Context
from tests.unit.decode_worker.test_role import BLOCK_BYTES, GEOMETRY, ROUTER, World, token

Request = decode_pb2.HandoffsRequest
Response = decode_pb2.HandoffsResponse

DEADLINE_S = 20.0


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which a router reads."""
    world = World(monkeypatch)
    world.role.outbox(ROUTER).open()
    return world


class Stream:
    """Both ends of one."""

    def __init__(self, world: World) -> None:
        self.answers: asyncio.Queue[Response] = asyncio.Queue()
        self.writing = 0
        self._requests: asyncio.Queue[Request | None] = asyncio.Queue()
        context = cast(Context, self)
        self.served = asyncio.ensure_future(
            world.role.answer_handoffs(self._each_request(), context)
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


def reserve(call: int, request: str = "r", length: int = 6, fingerprint: str = "model") -> Request:
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
    return Request(call=call, reserve=offer)


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
    assert not world.control.scheduler.is_idle()
    await stream.leave()
    world.role.abort(("r", 0))
    world.check_nothing_is_held()


async def test_a_commit_that_waits_holds_up_nobody(world: World) -> None:
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
    for number in range(4):
        stream.ask(reserve(4 + number, f"r{number}", length=60))
    answers = [await stream.told() for _ in range(4)]
    full = answers[-1].error
    assert (full.code, full.retry_after_ms) == ("no_decode_room", 50)
    await stream.leave()
    for number in range(4):
        world.role.abort((f"r{number}", 0))
    world.check_nothing_is_held()


async def test_an_error_that_nobody_meant_tells_no_more_than_its_kind(
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
