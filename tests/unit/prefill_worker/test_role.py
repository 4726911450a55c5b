"""The prefill role with a real control loop on the test's clock: deadlines and reports."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from types import SimpleNamespace

import pytest

from baton.errors import DeadlineExceeded
from baton.request import SequenceSpec
from baton.v1 import prefill_pb2
from kvtransfer.transports.transport import Peer
from prefill_worker import role as role_module
from prefill_worker.role import PrefillRole
from tests.support.worker.manual_worker import ManualWorker, settle, spec_of


class World(ManualWorker):
    """A prefill worker; its prompts end with their first token, so that nothing is handed off."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, max_sequences: int = 8) -> None:
        super().__init__(monkeypatch, max_sequences=max_sequences)
        monkeypatch.setattr(role_module, "time", self.clock)
        self.role = PrefillRole(self.context)
        self.core.subscribe(self.role)
        self.core.start()

    async def call(
        self, spec: SequenceSpec, receiver: str = ""
    ) -> asyncio.Task[list[prefill_pb2.PrefillResponse]]:
        async def responses() -> list[prefill_pb2.PrefillResponse]:
            async with aclosing(self.role.prefill(spec, "", receiver)) as found:
                return [response async for response in found]

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
    """Stands for the handoffs of a prefill role; receivers have room when the test says so."""

    def __init__(self) -> None:
        self.rooms: dict[str, asyncio.Event] = {}
        self.reserving: list[str] = []

    def make(
        self, context: object, spec: SequenceSpec, peer: Peer, staging: object, *, deadline: float
    ) -> SimpleNamespace:
        async def reserve() -> None:
            self.reserving.append(peer.incarnation)
            await self.rooms[peer.incarnation].wait()

        async def commit(first_token: int, **_: object) -> int:
            return 0

        async def close() -> None:
            pass

        return SimpleNamespace(
            reserve=reserve,
            commit=commit,
            close=close,
            check=lambda: None,
            computed=lambda *_: None,
            sends_layers=lambda _: False,
            sending=None,
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
