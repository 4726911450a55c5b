"""The prefill role with a real engine core on the test's clock: deadlines and reports."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace

import pytest

from baton.errors import DeadlineExceeded, HandoffError, TicketEnded, WorkerFailed
from baton.request import FirstToken, SequenceSpec
from baton.rpc import convert
from baton.v1 import prefill_pb2
from engine.scheduling.plan import StepResult
from kvtransfer.transports.transport import Peer
from prefill_worker import role as role_module
from prefill_worker.role import PrefillRole
from tests.support.worker.manual_worker import ManualWorker, settle, spec_of
from worker.prefill import flow


class World(ManualWorker):
    """A prefill worker; its prompts end with their first token, so that nothing is handed off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_sequences: int = 8) -> None:
        super().__init__(monkeypatch, max_sequences=max_sequences)
        for module in (role_module, flow):
            monkeypatch.setattr(module, "time", self.clock)
        self.role = PrefillRole(self.context)
        self.core.subscribe(self.role)
        self.core.start()

    async def call(
        self, spec: SequenceSpec, receiver: str = ""
    ) -> asyncio.Task[list[prefill_pb2.PrefillResponse]]:
        async def responses() -> list[prefill_pb2.PrefillResponse]:
            found: list[prefill_pb2.PrefillResponse] = []
            request = prefill_pb2.PrefillRequest(
                sequence=convert.sequence_to_proto(spec), decode_incarnation=receiver
            )
            await self.role.flow.run(request, found.append)
            return found

        task = asyncio.create_task(responses())
        await settle()
        return task


async def test_a_prompt_that_expires_is_in_no_later_step(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    call = await world.call(spec_of(length=60, max_tokens=1, deadline_s=20.0))
    await world.step(15.0)
    await world.step(15.0)
    assert not world.thread.plans
    with pytest.raises(DeadlineExceeded):
        await call
    world.check_nothing_is_held()


async def test_a_prompt_that_expires_in_line_is_never_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, max_sequences=2)
    # The blocks are taken, so that the second waits behind the first, which has its own.
    first = await world.call(spec_of("first", length=60, max_tokens=1))
    taken = world.pool.allocate(world.pool.available)
    second = await world.call(spec_of("second", first=5, max_tokens=1, deadline_s=20.0))
    await world.step(30.0)
    with pytest.raises(DeadlineExceeded):
        await second
    world.pool.release(taken)
    await world.drain()
    assert len(await first) == 1
    world.check_nothing_is_held()


async def test_what_a_prompt_took_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Time in line counts from the arrival, that for a place in the batch included."""
    world = World(monkeypatch, max_sequences=1)
    first = await world.call(spec_of("first", max_tokens=1))
    second = await world.call(spec_of("second", length=20, first=4, max_tokens=1))
    await world.step(0.5)
    await world.step(0.2)
    await world.step(0.1)
    (response,) = await first
    assert response.queue_ms == 0
    assert response.compute_ms == pytest.approx(500)
    assert response.computed_tokens == 6
    (response,) = await second
    assert response.queue_ms == pytest.approx(500)
    assert response.compute_ms == pytest.approx(300)
    assert response.computed_tokens == 20
    world.check_nothing_is_held()


class Handoffs:
    """Replaces the handoffs of a prefill role; receivers have room when the test decides."""

    def __init__(self) -> None:
        self.rooms: dict[str, asyncio.Event] = {}
        self.reserving: list[str] = []
        self.break_transfer: Callable[[Exception], None]
        """Of the handoff that was made last."""
        self.closed = 0
        self.committed: list[int] = []
        """The number of first tokens of each commit."""

    def make(
        self,
        context: object,
        spec: SequenceSpec,
        peer: Peer,
        staging: object,
        *,
        deadline: float,
        on_broken: Callable[[Exception], None],
    ) -> SimpleNamespace:
        self.break_transfer = on_broken

        async def reserve() -> None:
            self.reserving.append(peer.incarnation)
            await self.rooms[peer.incarnation].wait()

        async def commit(firsts: list[FirstToken]) -> int:
            self.committed.append(len(firsts))
            return 0

        async def close() -> None:
            self.closed += 1

        return SimpleNamespace(
            reserve=reserve,
            commit=commit,
            close=close,
            computed=lambda *_: None,
            sends_layers=lambda _: False,
            without_drafter=True,
            pinned_blocks=0,
            transport="shm",
        )


async def test_a_receiver_without_room_holds_up_no_prompt_for_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch, max_sequences=2)
    handoffs = Handoffs()
    monkeypatch.setattr(role_module, "Handoff", handoffs.make)
    handoffs.rooms = {"full": asyncio.Event(), "free": asyncio.Event()}
    handoffs.rooms["free"].set()
    waiting = [await world.call(spec_of(f"w{n}"), "full") for n in range(3)]
    assert handoffs.reserving == ["full"] * 2, "promises ahead of the prompts are bounded"
    other = await world.call(spec_of("other", first=4), "free")
    await world.drain()
    assert [r.HasField("handoff") for r in await other] == [False, True]
    assert not any(call.done() for call in waiting)
    handoffs.rooms["full"].set()
    await settle()
    await world.drain()
    await settle()
    await world.drain()
    for call in waiting:
        assert len(await call) == 2
    assert not len(world.role._handoffs)
    world.check_nothing_is_held()


@pytest.mark.parametrize("state", ["reserving", "computing"])
async def test_a_transfer_that_breaks_ends_its_prompt(
    monkeypatch: pytest.MonkeyPatch, state: str
) -> None:
    world = World(monkeypatch)
    handoffs = Handoffs()
    monkeypatch.setattr(role_module, "Handoff", handoffs.make)
    room = handoffs.rooms["decode-0:1"] = asyncio.Event()
    call = await world.call(spec_of(length=40), "decode-0:1")
    if state == "computing":
        room.set()
        await settle()
        await world.step()
    handoffs.break_transfer(HandoffError("the wire is cut"))
    room.set()
    await settle()
    await world.drain()
    with pytest.raises(HandoffError, match="cut"):
        await call
    assert handoffs.closed == 1
    world.check_nothing_is_held()


async def test_every_choice_has_its_first_token_sent_and_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    handoffs = Handoffs()
    monkeypatch.setattr(role_module, "Handoff", handoffs.make)
    handoffs.rooms["decode-0:1"] = asyncio.Event()
    handoffs.rooms["decode-0:1"].set()
    call = await world.call(replace(spec_of(), choices=3), "decode-0:1")
    # Its last chunk draws a token for each choice.
    world.thread.end(StepResult(world.plan().step, ((7, 8, 9),), 0.01))
    await settle()
    *firsts, handoff = await call
    told = [(each.first_token.choice, *each.first_token.token_ids) for each in firsts]
    assert told == [(0, 7), (1, 8), (2, 9)]
    assert handoff.HasField("handoff")
    assert handoffs.committed == [3]
    world.check_nothing_is_held()


async def test_an_attempt_is_computed_once_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two routers' streams, or a stream that was opened again, may bring it twice."""
    world = World(monkeypatch)
    first = await world.call(spec_of(max_tokens=1))
    second = await world.call(spec_of(max_tokens=1))
    await world.drain()
    with pytest.raises(TicketEnded, match="is already placed"):
        await second
    assert len(await first) == 1
    again = await world.call(spec_of(max_tokens=1))
    await world.drain()
    assert len(await again) == 1
    world.check_nothing_is_held()


async def test_prompts_of_a_worker_that_stops_end_in_every_state(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    handoffs = Handoffs()
    monkeypatch.setattr(role_module, "Handoff", handoffs.make)
    room = handoffs.rooms["decode-0:1"] = asyncio.Event()
    reserving = await world.call(spec_of("reserving", first=3), "decode-0:1")
    computing = await world.call(spec_of("computing", length=40, max_tokens=1))
    await world.step()
    await world.role.close()
    room.set()
    await settle()
    await world.drain()
    for call in (reserving, computing):
        with pytest.raises(WorkerFailed, match="stopping"):
            await call
    world.check_nothing_is_held()
