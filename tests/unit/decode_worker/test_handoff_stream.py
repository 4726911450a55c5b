"""A writer's calls, as a real decode role answers them on a stream of the test's own."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any, cast
from unittest.mock import Mock

import pytest

from baton.errors import Unavailable
from baton.hashing import block_hashes
from baton.request import SequenceSpec
from baton.rpc import convert
from baton.sampling_params import SamplingParams
from baton.v1 import decode_pb2
from decode_worker import receiver as receiver_module
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


# Reserves that wait for room


async def full(world: World) -> Stream:
    """A stream to a worker whose blocks are all promised, to ``r0`` and ``r1``."""
    stream = Stream(world)
    stream.ask(reserve(1, "r0", length=60), reserve(2, "r1", length=60))
    for _ in range(2):
        assert (await stream.told()).HasField("reserve")
    return stream


async def test_a_reserve_waits_for_room_and_is_answered_in_its_turn(world: World) -> None:
    stream = await full(world)
    stream.ask(reserve(3, "large", length=60), reserve(4, "small"), abort(5, "other"))
    assert (await stream.told()).call == 5, "a waiting reserve holds up no other call"
    stream.ask(abort(6, "r0"))
    answers = {answer.call: answer for answer in [await stream.told() for _ in range(2)]}
    assert answers[6].HasField("abort")
    assert answers[3].reserve.missing_blocks == 15, "it came first"
    assert stream.answers.empty()
    stream.ask(abort(7, "r1"))
    assert {(await stream.told()).call, (await stream.told()).call} == {4, 7}
    await stream.leave()
    for request in ("large", "small"):
        world.role.abort((request, 0))
    world.check_nothing_is_held()


async def test_a_reserve_waits_no_longer_than_it_has_time(world: World) -> None:
    stream = await full(world)
    stream.ask(reserve(3, "late", length=60, timeout_ms=20))
    answer = await stream.told()
    assert (answer.call, answer.error.code) == (3, "deadline_exceeded")
    await given_up(world, stream)


async def test_an_abort_ends_the_reserve_that_waits(world: World) -> None:
    stream = await full(world)
    stream.ask(reserve(3, "late", length=60), abort(4, "late"))
    answers = {answer.call: answer for answer in [await stream.told() for _ in range(2)]}
    assert answers[3].error.code == "handoff_ticket_ended"
    assert answers[4].HasField("abort")
    stream.ask(reserve(5, "late"))
    assert (await stream.told()).error.code == "handoff_ticket_ended", "it is over for good"
    await given_up(world, stream)


async def test_a_reserve_that_waits_ends_with_its_writer(world: World) -> None:
    stream, other = await full(world), Stream(world)
    other.ask(reserve(1, "late", length=60), abort(2, "other"))
    await other.told()
    await other.leave()
    await given_up(world, stream)


@pytest.mark.parametrize("is_refused", [False, True])
async def test_a_reserve_does_not_outlive_a_stream_that_ends_as_it_comes(
    world: World, *, is_refused: bool
) -> None:
    """Neither in the queue, nor with an error that nothing reads."""
    complaints: list[str] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    stream, other = await full(world), Stream(world)
    await asyncio.sleep(0)
    other.ask(reserve(1, "late", length=60))
    other.served.cancel()
    if is_refused:
        loop.call_soon(world.role.abort_handoff, ("late", 0))
    await asyncio.gather(other.served, return_exceptions=True)
    assert not len(world.role.reserves)
    await given_up(world, stream)
    gc.collect()
    assert complaints == []


async def test_a_worker_that_is_drained_answers_waiting_reserves(world: World) -> None:
    stream = await full(world)
    stream.ask(reserve(3, "late", length=60), abort(4, "other"))
    await stream.told()
    world.role.context.intake.close()
    await world.role.heartbeat()
    assert "is draining" in (await stream.told()).error.message
    await given_up(world, stream)


async def given_up(world: World, stream: Stream) -> None:
    """No reserve waits any more: nothing is promised to ``late`` once there is room."""
    for request in ("r0", "r1"):
        world.role.abort((request, 0))
    await asyncio.sleep(0)
    assert not len(world.role.reserves)
    await stream.leave()
    world.check_nothing_is_held()


async def test_waiting_reserves_hash_no_prompts(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    hashed = 0

    def counting(*arguments: Any) -> list[bytes]:
        nonlocal hashed
        hashed += 1
        return block_hashes(*arguments)

    stream = await full(world)
    monkeypatch.setattr(receiver_module, "block_hashes", counting)
    stream.ask(*(reserve(10 + n, f"w{n}", length=12) for n in range(16)), abort(4, "other"))
    await stream.told()
    matches = Mock(return_value=[])
    monkeypatch.setattr(world.pool, "match", matches)
    for _ in range(100):
        world.role.on_emit([])
        await asyncio.sleep(0)
    assert hashed <= 1, "the hashes of the first reserve are kept"
    assert not matches.called, "by count there is no room"
    monkeypatch.undo()
    for request in ("r0", "r1"):
        world.role.abort((request, 0))
    for _ in range(8):
        assert (await stream.told()).HasField("reserve")
    for number in range(16):
        world.role.abort((f"w{number}", 0))
    await stream.leave()
    world.check_nothing_is_held()


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
