"""Grammars in a worker: compiled before a sequence is queued, and an end for those that fail."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from dataclasses import replace
from typing import Any

import pytest

from baton.errors import BatonError, GrammarFailed, InvalidGrammar, TicketEnded
from baton.grammars import grammar_gate
from baton.request import SequenceSpec
from baton.rpc import convert
from baton.v1 import decode_pb2, prefill_pb2
from decode_worker import local_prefill
from decode_worker import requests as decode_module
from decode_worker.receiver import Offer
from decode_worker.role import DecodeRole
from decode_worker.service import HandoffStream
from engine.scheduling.plan import StepResult
from engine.scheduling.sequence import Sequence, SequenceUpdate
from prefill_worker import role as prefill_module
from prefill_worker.role import PrefillRole
from tests.support.baton.grammar_tools import WAIT_S, SlowGrammars, regex
from tests.support.worker.manual_worker import (
    BLOCK_BYTES,
    GEOMETRY,
    INCARNATION,
    ROUTER,
    ManualWorker,
    settle,
    spec_of,
)
from worker.prefill import flow


class World(ManualWorker):
    """A worker whose grammars are compiled when the test lets them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        for module in (decode_module, local_prefill, prefill_module, flow, grammar_gate):
            monkeypatch.setattr(module, "time", _Clock(self))
        self.slow = SlowGrammars()
        engine: Any = self.context.engine
        engine.grammars = self.slow.grammars
        settings: Any = self.context.settings
        settings.pool.role = "decode"

    async def compiled(self) -> None:
        """All that waits to be compiled is."""
        self.slow.may_go.set()
        gate = self.context.grammars
        async with asyncio.timeout(WAIT_S):
            while not gate.idle:
                await asyncio.sleep(0.001)
        await settle()


class _Clock:
    """In place of the module ``time``."""

    def __init__(self, world: ManualWorker) -> None:
        self._world = world

    def monotonic(self) -> float:
        return self._world.now

    def perf_counter(self) -> float:
        return self._world.now


def strict(text: str = "a+", request: str = "r", max_tokens: int = 3) -> SequenceSpec:
    spec = spec_of(request, max_tokens=max_tokens)
    return replace(spec, sampling=replace(spec.sampling, grammar=regex(text)))


async def call(
    role: PrefillRole | DecodeRole, spec: SequenceSpec
) -> asyncio.Task[list[prefill_pb2.PrefillResponse]]:
    """A prefill that has got as far as it can without a step and without a compiler."""
    request = prefill_pb2.PrefillRequest(
        sequence=convert.sequence_to_proto(spec), decode_incarnation=INCARNATION
    )

    async def responses() -> list[prefill_pb2.PrefillResponse]:
        found: list[prefill_pb2.PrefillResponse] = []
        await role.flow.run(request, found.append)
        return found

    task = asyncio.create_task(responses())
    await settle()
    return task


def prefill(world: World) -> PrefillRole:
    role = PrefillRole(world.context)
    world.core.subscribe(role)
    world.core.start()
    return role


def decode(world: World) -> DecodeRole:
    role = DecodeRole(world.context)
    world.core.subscribe(role)
    world.core.start()
    role.sequences.outbox(ROUTER).open()
    return role


@pytest.mark.parametrize("where", ["prefill worker", "decode worker"])
async def test_a_prompt_is_queued_once_its_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """Meanwhile others are computed."""
    world = World(monkeypatch)
    role = prefill(world) if where == "prefill worker" else decode(world)
    waiting = await call(role, strict(max_tokens=1))
    other = await call(role, spec_of("other", max_tokens=1))
    await world.drain()
    assert other.done()
    assert not waiting.done()
    await world.compiled()
    # Nothing that is compiled since can hold the engine up.
    (new,) = world.plan().new
    assert new.matcher is not None
    assert not new.matcher.is_error()
    await world.drain()
    assert len(await waiting) == 1
    assert world.slow.compiled == ["a+"]
    world.check_nothing_is_held()


@pytest.mark.parametrize("where", ["prefill worker", "decode worker"])
async def test_a_grammar_that_does_not_compile_is_an_error(
    monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    world = World(monkeypatch)
    role = prefill(world) if where == "prefill worker" else decode(world)
    waiting = await call(role, strict("bad"))
    await world.compiled()
    with pytest.raises(InvalidGrammar, match="it is bad"):
        await waiting
    assert not world.thread.plans
    world.check_nothing_is_held()


async def test_a_prompt_that_is_aborted_while_its_grammar_is_compiled(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    role = decode(world)
    waiting = await call(role, strict())
    role.abort(("r", 0))
    await world.compiled()
    with pytest.raises(TicketEnded):
        await waiting
    assert not world.thread.plans
    world.check_nothing_is_held()


class Written:
    """The answers on a writer's stream."""

    def __init__(self) -> None:
        self.responses: list[decode_pb2.HandoffsResponse] = []

    async def write(self, response: decode_pb2.HandoffsResponse) -> None:
        self.responses.append(response)


async def handed_off(
    world: World, role: DecodeRole, spec: SequenceSpec, *, wait: bool
) -> list[decode_pb2.HandoffsResponse]:
    """Reserve, send every block, commit; what the commit was answered before it could be."""
    ticket = role.reserve(Offer("model", GEOMETRY, INCARNATION, "writer", spec))
    for index in range(len(ticket.missing)):
        blocks = world.receiver.begin_copy(
            ticket.ticket_id, "writer", "shm", [index], 0, BLOCK_BYTES, world.now
        )
        assert blocks is not None
        world.receiver.end_copy(ticket.ticket_id, "shm", BLOCK_BYTES)
    written: Any = Written()
    request = decode_pb2.HandoffsRequest(timeout_ms=60000)
    request.commit.ticket_id, request.commit.writer = ticket.ticket_id, "writer"
    request.commit.first_token = 7

    async def requests() -> AsyncGenerator[decode_pb2.HandoffsRequest, None]:
        yield request
        await asyncio.Event().wait()

    stream = HandoffStream(role, written)
    running = asyncio.create_task(stream.run(requests()))
    await settle()
    if wait:
        assert not written.responses
        # Its writer renews nothing any more: all has landed.
        world.now += 30.0
        world.receiver.sweep(world.now)
        await world.compiled()
    await settle()
    running.cancel()
    await asyncio.wait([running])
    found: list[decode_pb2.HandoffsResponse] = written.responses
    return found


async def test_a_commit_waits_for_the_grammar(monkeypatch: pytest.MonkeyPatch) -> None:
    """It was begun when the ticket was promised; a second request finds it compiled."""
    world = World(monkeypatch)
    role = decode(world)
    (response,) = await handed_off(world, role, strict(), wait=True)
    assert not response.HasField("error")
    (response,) = await handed_off(world, role, strict(request="again"), wait=False)
    assert not response.HasField("error")
    assert world.slow.compiled == ["a+"]
    here = [*world.scheduler.running, *world.scheduler.waiting]
    assert {sequence.spec.request_id for sequence in here} == {"r", "again"}
    assert all(sequence.matcher is not None for sequence in here)
    for request in ("r", "again"):
        role.abort((request, 0))
    for _ in range(len(world.thread.plans)):
        plan = world.plan()
        world.thread.end(StepResult(plan.step, tuple((1,) for _ in plan.rows), 0.0))
    await settle()
    world.check_nothing_is_held()


async def test_a_commit_whose_grammar_does_not_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    role = decode(world)
    (response,) = await handed_off(world, role, strict("bad"), wait=True)
    assert response.error.code == InvalidGrammar.code
    world.now += 2.9
    world.receiver.sweep(world.now)
    assert len(world.receiver.book) == 1, "its lease begins when the wait ends"
    world.now += 0.1
    world.receiver.sweep(world.now)
    await settle()
    world.check_nothing_is_held()


class Listener:
    """Records its calls."""

    def __init__(self) -> None:
        self.updates: list[SequenceUpdate] = []
        self.lost: list[tuple[list[Sequence], BatonError]] = []

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        self.updates += updates

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        self.lost.append((sequences, error))

    def on_expire(self, sequences: list[Sequence]) -> None:
        raise AssertionError("nothing expires")


async def test_one_that_cannot_go_on_ends_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch)
    listener = Listener()
    world.core.subscribe(listener)
    world.core.start()
    sequences = [
        world.context.make_sequence(spec_of(name), arrived=world.now, deadline=1e9)
        for name in ("broken", "sound")
    ]
    for sequence in sequences:
        world.scheduler.add(sequence)
    world.core.schedule_steps()
    plan = world.plan()
    world.thread.end(StepResult(plan.step, ((1,), (2,)), 0.01, ((0, "too many states"),)))
    await settle()
    ((lost, error),) = listener.lost
    assert [sequence.spec.request_id for sequence in lost] == ["broken"]
    assert isinstance(error, GrammarFailed)
    assert error.message == "too many states"
    assert [update.token_ids for update in listener.updates] == [(2,)]
    world.core.remove(sequences[1])
    while world.thread.plans:
        plan = world.plan()
        world.thread.end(StepResult(plan.step, tuple((1,) for _ in plan.rows), 0.0))
        await settle()
    world.check_nothing_is_held()


async def test_the_roles_pass_on_why(monkeypatch: pytest.MonkeyPatch) -> None:
    for where in ("prefill", "decode"):
        world = World(monkeypatch)
        role = prefill(world) if where == "prefill" else decode(world)
        waiting = await call(role, spec_of(max_tokens=1))
        plan = world.plan()
        world.thread.end(StepResult(plan.step, ((1,),), 0.01, ((0, "too many states"),)))
        await settle()
        with pytest.raises(BatonError, match="too many states") as raised:
            await waiting
        assert isinstance(raised.value, GrammarFailed)
        world.check_nothing_is_held()
