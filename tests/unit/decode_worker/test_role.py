"""The decode role with a real scheduler and no engine: what becomes of sequences and outputs."""

from __future__ import annotations

import asyncio

import pytest

from baton.errors import ChecksumMismatch, HandoffError, TicketEnded, WorkerFailed
from baton.request import (
    FinishReason,
    FirstToken,
)
from decode_worker.requests import ROUTER_GRACE_S
from tests.support.decode_worker.decode_worker_role import BLOCK_BYTES, ROUTER, VOCAB, World, token


@pytest.fixture
def world(monkeypatch: pytest.MonkeyPatch) -> World:
    """A world in which a router reads."""
    world = World(monkeypatch)
    world.role.sequences.outbox(ROUTER).open()
    return world


async def test_the_first_token_is_sent_again_and_the_others_once(world: World) -> None:
    world.commit(max_tokens=3)
    assert world.told() == [token(0, 7)]
    world.core.step(8)
    assert world.told() == [token(1, 8)]
    world.core.step(9)
    assert world.told() == [token(2, 9, FinishReason.LENGTH)]
    await world.role.heartbeat()
    world.check_nothing_is_held()


async def test_a_sequence_whose_deadline_has_passed_is_reported_and_stops(world: World) -> None:
    world.commit(deadline_s=5.0)
    world.core.step()
    world.told()
    world.now += 4.9
    await world.role.heartbeat()
    assert world.told() == []
    world.now += 0.2
    await world.role.heartbeat()
    (output,) = world.told()
    assert (output.error_code, output.index) == ("deadline_exceeded", 2)
    world.check_nothing_is_held()


async def test_a_deadline_that_passes_during_a_step(world: World) -> None:
    world.commit(deadline_s=5.0)
    world.told()
    plan = world.core.plan()
    world.now += 5.0
    await world.role.heartbeat()
    assert [bool(output.error) for output in world.told()] == [True]
    world.core.end(plan)
    assert world.told() == [], "tokens after the error"
    world.check_nothing_is_held()


async def test_a_deadline_ends_a_ticket_too(world: World) -> None:
    ticket_id = world.reserve(deadline_s=1.0)
    world.now += 1.0
    await world.role.heartbeat()
    with pytest.raises(TicketEnded):
        world.role.commit(ticket_id, "writer", [FirstToken(7)])
    world.check_nothing_is_held()


async def test_a_router_learns_soon_that_its_ticket_is_taken(world: World) -> None:
    """It waits for the first token of this worker from now on, and takes silence for a hang."""
    outbox = world.role.sequences.outbox(ROUTER)
    assert not world.role.has_work_of(ROUTER)
    outbox.take()
    waiting = asyncio.create_task(outbox.wait(30.0))
    await asyncio.sleep(0)
    ticket_id = world.reserve()
    assert world.role.has_work_of(ROUTER)
    assert not world.role.has_work_of("another")
    async with asyncio.timeout(5.0):
        await waiting
    world.role.abort(("r", 0))
    assert not world.role.has_work_of(ROUTER)
    with pytest.raises(TicketEnded):
        world.role.commit(ticket_id, "writer", [FirstToken(7)])


async def test_a_writer_gives_up_what_it_has_committed_without_knowing(world: World) -> None:
    """The answer to its commit was lost: the sequence runs on, and has still its deadline."""
    world.commit(deadline_s=5.0)
    world.told()
    world.role.abort_handoff(("r", 0))
    world.role.abort_handoff(("r", 0))
    world.core.step()
    assert world.told() == [token(1, 9)]
    world.now += 5.0
    await world.role.heartbeat()
    assert [bool(output.error) for output in world.told()] == [True]
    world.check_nothing_is_held()


async def test_a_first_token_that_the_model_lacks_is_not_committed(world: World) -> None:
    """The writer can still give up; nothing runs."""
    ticket_id = world.reserve()
    world.receive(ticket_id)
    with pytest.raises(HandoffError, match="does not have"):
        world.role.commit(ticket_id, "writer", [FirstToken(VOCAB)])
    assert world.core.scheduler.schedule() is None
    world.role.abort_handoff(("r", 0))
    world.check_nothing_is_held()


async def test_a_writer_gives_up_before_its_commit(world: World) -> None:
    ticket_id = world.reserve()
    world.role.abort_handoff(("r", 0))
    with pytest.raises(TicketEnded):
        world.role.commit(ticket_id, "writer", [FirstToken(7)])
    with pytest.raises(TicketEnded):
        world.reserve()
    assert world.told() == []
    world.check_nothing_is_held()


async def test_an_abort_ends_a_sequence_in_every_state(world: World) -> None:
    world.role.abort(("early", 0))
    with pytest.raises(TicketEnded):
        world.reserve("early")
    world.reserve("reserved")
    world.commit("waiting")
    for request in ("reserved", "waiting"):
        world.role.abort((request, 0))
    world.commit("running")
    plan = world.core.plan()
    world.role.abort(("running", 0))
    world.role.abort(("running", 0))
    world.told()
    world.core.end(plan)
    assert world.told() == []
    await world.role.heartbeat()
    world.check_nothing_is_held()


async def test_sequences_of_a_router_that_has_gone_end(world: World) -> None:
    outbox = world.role.sequences.outbox(ROUTER)
    reader = outbox.open()
    world.commit()
    outbox.close(reader, world.now)
    world.now += ROUTER_GRACE_S - 0.1
    await world.role.heartbeat()
    assert not world.core.scheduler.is_idle()
    world.now += 0.2
    await world.role.heartbeat()
    world.check_nothing_is_held()
    assert world.role.sequences.outbox(ROUTER) is not outbox


async def test_a_router_that_reconnects_in_time_keeps_its_sequences(world: World) -> None:
    outbox = world.role.sequences.outbox(ROUTER)
    reader = outbox.open()
    world.commit()
    outbox.close(reader, world.now)
    world.now += ROUTER_GRACE_S - 0.1
    outbox.open()
    world.now += ROUTER_GRACE_S
    await world.role.heartbeat()
    assert world.told() == [token(0, 7)]
    assert not world.core.scheduler.is_idle()
    world.role.abort(("r", 0))
    world.check_nothing_is_held()


async def test_an_engine_that_fails_ends_its_sequences_with_an_error(world: World) -> None:
    world.commit()
    world.told()
    plan = world.core.plan()
    world.role.on_fail(world.core.scheduler.fail(plan), WorkerFailed("no memory"))
    (output,) = world.told()
    assert output.error == "no memory"
    assert (output.error_code, output.index) == ("worker_failed", 1)
    world.role.abort(("r", 0))
    await world.role.heartbeat()
    world.check_nothing_is_held()


async def test_closing_ends_everything(world: World) -> None:
    ticket_id = world.reserve("reserved")
    world.commit("running")
    world.told()
    await world.role.close()
    assert [(o.request_id, bool(o.error)) for o in world.told()] == [("running", True)]
    with pytest.raises(TicketEnded):
        world.role.commit(ticket_id, "writer", [FirstToken(7)])
    world.check_nothing_is_held()


# Commits that wait for bytes


async def waiting_commit(world: World, ticket_id: str, writer: str = "writer") -> asyncio.Task[int]:
    """A commit that has come before the last byte has."""
    commit = asyncio.create_task(
        world.role.commit_when_complete(ticket_id, writer, [FirstToken(7)])
    )
    for _ in range(3):
        await asyncio.sleep(0)
    assert not commit.done()
    return commit


async def test_a_commit_waits_for_the_last_byte(world: World) -> None:
    ticket_id = world.reserve(max_tokens=2)
    commit = await waiting_commit(world, ticket_id)
    world.begin_copy(ticket_id, 0)
    world.blocks.end_copy(ticket_id, "shm", BLOCK_BYTES)
    world.begin_copy(ticket_id, 1)
    await asyncio.sleep(0)
    assert not commit.done()
    assert world.told() == []
    world.blocks.end_copy(ticket_id, "shm", BLOCK_BYTES)
    assert await commit == 2 * BLOCK_BYTES
    assert world.told() == [token(0, 7)]
    world.core.step()
    assert world.told() == [token(1, 9, FinishReason.LENGTH)]
    world.check_nothing_is_held()


async def test_a_commit_that_waits_learns_what_has_ended_its_ticket(world: World) -> None:
    damaged = world.reserve("damaged")
    world.begin_copy(damaged, 0)
    expired, aborted = world.reserve("expired"), world.reserve("aborted")
    commits = [await waiting_commit(world, each) for each in (damaged, expired, aborted)]
    world.blocks.fail_copy(damaged, ChecksumMismatch("a part arrived damaged"), 1.0)
    world.role.abort_handoff(("aborted", 0))
    world.now += 3.0
    world.blocks.sweep(world.now)
    with pytest.raises(ChecksumMismatch, match="arrived damaged"):
        await commits[0]
    with pytest.raises(HandoffError, match="writer was silent"):
        await commits[1]
    with pytest.raises(TicketEnded):
        await commits[2]
    assert world.told() == []
    world.check_nothing_is_held()


async def test_a_commit_that_waits_ends_with_its_requests_deadline(world: World) -> None:
    commit = await waiting_commit(world, world.reserve(deadline_s=1.0))
    world.now += 1.0
    await world.role.heartbeat()
    with pytest.raises(TicketEnded):
        await commit
    world.check_nothing_is_held()


async def test_a_commit_that_waits_ends_when_the_role_does(world: World) -> None:
    commit = await waiting_commit(world, world.reserve())
    await world.role.close()
    with pytest.raises(TicketEnded):
        await commit
    world.check_nothing_is_held()


async def test_of_two_commits_that_wait_one_runs(world: World) -> None:
    """The first was sent again, because its answer did not come in time."""
    ticket_id = world.reserve()
    commits = [await waiting_commit(world, ticket_id) for _ in range(2)]
    world.receive(ticket_id)
    results = await asyncio.gather(*commits, return_exceptions=True)
    assert sorted(map(type, results), key=repr) == sorted([int, TicketEnded], key=repr)
    assert 2 * BLOCK_BYTES in results
    assert world.told() == [token(0, 7)]
    world.role.abort(("r", 0))
    world.check_nothing_is_held()


async def test_a_commit_whose_caller_has_left_commits_nothing(world: World) -> None:
    ticket_id = world.reserve()
    commit = await waiting_commit(world, ticket_id)
    commit.cancel()
    with pytest.raises(asyncio.CancelledError):
        await commit
    world.receive(ticket_id)
    assert world.told() == []
    world.role.abort_handoff(("r", 0))
    world.check_nothing_is_held()


async def test_a_commit_of_another_writer_is_refused_once_the_bytes_are_there(world: World) -> None:
    ticket_id = world.reserve()
    world.receive(ticket_id)
    with pytest.raises(TicketEnded, match="not open for another"):
        await world.role.commit_when_complete(ticket_id, "another", [FirstToken(7)])
    with pytest.raises(TicketEnded, match="unknown"):
        await world.role.commit_when_complete("unknown", "writer", [FirstToken(7)])
    world.role.abort(("r", 0))
    world.check_nothing_is_held()


async def test_a_role_that_has_ended_takes_no_notice_of_tickets(world: World) -> None:
    """Another role of the same worker may follow."""
    assert world.blocks._listeners
    await world.role.close()
    assert not world.blocks._listeners
