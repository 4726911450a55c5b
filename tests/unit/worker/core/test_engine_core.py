"""The engine core on a clock of the test's: deadlines, reports, chunks with other sequences."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch

from baton.errors import BatonError, StepFailed, WorkerFailed
from baton.request import SequenceSpec
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.sequence import Sequence, SequenceUpdate
from tests.support.engine.fake_engine import answer, kv_of, next_token
from tests.support.worker.manual_worker import SIZE, ManualWorker, settle, spec_of
from worker.core.step_planner import MIN_TOKENS, PrefillBudget
from worker.costs.step_costs import StepCosts


class Listener:
    """Records its calls."""

    def __init__(self) -> None:
        self.updates: list[SequenceUpdate] = []
        self.expired: list[Sequence] = []
        self.lost: list[Sequence] = []
        self.errors: list[BatonError] = []

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        self.updates += updates

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        self.lost += sequences
        self.errors.append(error)

    def on_expire(self, sequences: list[Sequence]) -> None:
        self.expired += sequences


class World(ManualWorker):
    """A worker with a listener."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, **fields: object) -> None:
        super().__init__(monkeypatch, **fields)  # type: ignore[arg-type]
        self.listener = Listener()
        self.core.subscribe(self.listener)
        self.core.start()
        self.made: list[Sequence] = []

    def make(self, spec: SequenceSpec, deadline: float = math.inf) -> Sequence:
        self.made.append(self.context.make_sequence(spec, arrived=self.now, deadline=deadline))
        return self.made[-1]

    def add(self, spec: SequenceSpec, deadline: float = math.inf) -> Sequence:
        sequence = self.make(spec, deadline)
        self.core.add(sequence)
        return sequence

    async def hand_in(self, spec: SequenceSpec, deadline: float = math.inf) -> Sequence:
        """A handoff, with its first token."""
        sequence = self.make(spec, deadline)
        tokens = list(spec.token_ids)
        blocks = self.pool.allocate(-(-len(tokens) // SIZE))
        self.model.write(blocks, 0, kv_of(tokens))
        sequence.token_ids.append(next_token(tokens, len(tokens), 0, ()))
        self.core.add_computed(sequence, blocks, len(tokens))
        await settle()
        return sequence


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> World:
    return World(monkeypatch)


async def test_an_expired_prompt_is_in_no_later_step(world: World) -> None:
    """It is reported with the end of the step in which it expired, and frees its blocks then."""
    sequence = world.add(spec_of(length=40), deadline=100.05)
    await world.step(0.01)
    assert [row.sequence_id for row in world.plan().rows] == [sequence.sequence_id]
    await world.step(0.05)
    assert world.listener.expired == [sequence]
    assert not world.thread.plans
    world.check_nothing_is_held()


async def test_one_that_waits_in_line_is_never_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(monkeypatch, max_sequences=1)
    world.add(spec_of("long", length=40))
    waiting = world.add(spec_of("waits"), deadline=100.005)
    await world.step(0.01)
    assert world.listener.expired == [waiting]
    while world.thread.plans:
        plan = await world.step()
        assert all(row.sequence_id != waiting.sequence_id for row in plan.rows)
    world.check_nothing_is_held()


async def test_one_that_decodes_stops_and_the_others_go_on(world: World) -> None:
    gone = await world.hand_in(spec_of("gone", max_tokens=20), deadline=100.015)
    stays = await world.hand_in(spec_of("stays", first=3, max_tokens=20))
    await world.step()
    await world.step()
    assert world.listener.expired == [gone]
    # Two steps may have been planned before the deadline; no later one has it.
    while any(len(plan.rows) > 1 for plan in world.thread.plans):
        await world.step()
    for _ in range(3):
        plan = await world.step()
        assert [row.sequence_id for row in plan.rows] == [stays.sequence_id]
    world.core.remove(stays)
    await world.drain()
    world.check_nothing_is_held()


async def test_without_steps_the_next_schedule_ends_what_has_expired(world: World) -> None:
    """The heartbeat's, for one that is not computed: here there are no blocks for it."""
    taken = world.pool.allocate(world.pool.available)
    sequence = world.add(spec_of(), deadline=101.0)
    assert not world.thread.plans
    world.now = 101.0
    world.core.schedule_steps()
    assert world.listener.expired == [sequence]
    world.pool.release(taken)
    world.check_nothing_is_held()


async def test_a_prompt_that_has_expired_before_it_came(world: World) -> None:
    sequence = world.add(spec_of(), deadline=world.now)
    assert world.listener.expired == [sequence]
    assert not world.thread.plans


async def test_reports_of_decode_steps(world: World) -> None:
    first = await world.hand_in(spec_of("one", length=6, max_tokens=20))
    assert world.core.load().step_ms == 0
    await world.step(0.02)
    load = world.core.load()
    assert load.step_ms == pytest.approx(20)
    assert (load.step_batch, load.step_context_tokens) == (1, 7)
    assert load.context_tokens == first.computed == 7
    # The engine waited before it began: its pause counts, as clients wait for it too.
    world.now += 0.01
    await world.step(0.02)
    assert world.core.load().step_ms == pytest.approx((20 + 30) / 2)


async def test_queue_time_and_compute_time(world: World) -> None:
    world.add(spec_of("first", length=16))
    second = world.add(spec_of("second", length=24, first=5))
    await world.step(0.5)
    assert second.queue_s == pytest.approx(0.5)
    await world.step(0.3)
    value = world.metrics.registry.get_sample_value
    assert value("baton_queue_seconds_count", {"role": "decode"}) == 2
    assert value("baton_queue_seconds_sum", {"role": "decode"}) == pytest.approx(0.5)
    await world.step(0.2)
    assert second.computed_here == 24
    # 15 of 16 tokens of the second step (the other's token is the 16th), and 9 of 10 of the third.
    assert second.compute_s == pytest.approx(0.3 * 15 / 16 + 0.2 * 9 / 10)


async def test_a_prompt_is_chunked_by_what_the_others_can_bear(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One decode step takes 10 ms, a prompt token 1 ms, and the SLO is 30 ms."""
    costs = StepCosts((0.0, 1.0, 0.0), (10.0, 0.0, 0.0))
    world = World(monkeypatch, chunk_tokens=50, budget=PrefillBudget(costs, 0.03))
    running = await world.hand_in(spec_of("runs", max_tokens=40))
    prompt = world.add(spec_of("prompt", length=45, first=5, max_tokens=2))
    chunks = []
    while prompt.finish_reason is None:
        plan = await world.step(0.02)
        counts = {row.sequence_id: row.count for row in plan.rows}
        assert counts[running.sequence_id] == 1, "a step without the next token of who decodes"
        chunks.append(counts.get(prompt.sequence_id, 0))
    chunks = [count for count in chunks if count > 1]
    assert sum(chunks) == 45
    # The steps took as long as was predicted for less: the bound may grow a little.
    assert max(chunks) <= 30, chunks
    assert min(chunks[:-1]) >= MIN_TOKENS, chunks
    world.core.remove(running)
    await world.drain()
    alone = world.add(spec_of("alone", length=45, first=7, max_tokens=2))
    plan = await world.step()
    assert [row.count for row in plan.rows] == [45]
    world.core.remove(alone)
    await world.drain()
    world.check_nothing_is_held()


async def test_an_engine_that_ends_no_step_ends_the_worker(world: World) -> None:
    """Its event loop beats all the while."""
    world.add(spec_of(length=40))
    for _ in range(60):
        world.now += 1.0
        world.core.beat(world.now)
    assert world.core.load().steps_in_flight
    await world.step()
    assert world.core.load().engine_steps == 1
    world.now += 3600.0
    for _ in range(61):
        world.core.beat(world.now)
        world.now += 1.0
    with pytest.raises(WorkerFailed, match="engine"):
        world.core.beat(world.now)


async def test_failed_steps_are_no_progress(world: World) -> None:
    world.add(spec_of("one", length=8))
    await world.step()
    assert world.core.load().engine_steps == 1
    await world.fail()
    assert world.core.load().engine_steps == 1
    (error,) = world.listener.errors
    assert (error.code, error.message) == (
        StepFailed.code,
        "the worker's engine failed: RuntimeError",
    )
    # The step that was planned behind it.
    await world.fail()
    world.check_nothing_is_held()


async def test_blocks_of_a_failed_step_stay_while_a_plan_names_them(world: World) -> None:
    """The step behind it may write to them; it brings nothing any more."""
    sequence = await world.hand_in(spec_of("runs", max_tokens=20))
    assert len(world.thread.plans) == 2
    blocks = world.pool.counts().used
    world.thread.end(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."))
    await settle()
    assert world.listener.lost == [sequence]
    assert "no memory left" in world.listener.errors[0].message
    assert world.pool.counts().used == blocks
    world.thread.end(StepResult(2, ((),), left_out=(0,)))
    await settle()
    assert world.listener.lost == [sequence]
    world.check_nothing_is_held()
    assert not world.reasons


async def test_a_sequence_keeps_its_blocks_and_tokens_until_its_own_step_fails(
    world: World,
) -> None:
    one = await world.hand_in(spec_of("one", max_tokens=20))
    two = await world.hand_in(spec_of("two", first=3, max_tokens=20))
    await world.step()
    await world.step()
    assert [len(plan.rows) for plan in world.thread.plans] == [2, 2]
    blocks = world.pool.counts().used
    await world.fail()
    assert len(world.thread.plans) == 1, "nothing else is planned yet"
    await world.fail()
    assert not world.listener.lost
    assert world.pool.counts().used == blocks
    (plan,) = world.thread.plans
    assert [new.token_ids for new in plan.new] == [tuple(one.token_ids)]
    await world.step()
    (plan,) = world.thread.plans
    assert [row.sequence_id for row in plan.rows] == [two.sequence_id]
    await world.fail()
    assert world.listener.lost == [two]
    world.core.remove(one)
    await world.drain()
    world.check_nothing_is_held()


def breaks(*bad: str) -> Callable[[World, StepPlan], bool]:
    """A step fails if one of these requests is aboard."""

    def fails(world: World, plan: StepPlan) -> bool:
        numbers = {row.sequence_id for row in plan.rows}
        return any(one.sequence_id in numbers and one.spec.request_id in bad for one in world.made)

    return fails


async def run_all(world: World, fails: Callable[[World, StepPlan], bool]) -> None:
    """Run steps until nothing is left, or the worker has ended."""
    while world.thread.plans and not world.reasons:
        if fails(world, world.plan()):
            await world.fail()
        else:
            await world.step()


async def test_a_bad_request_ends_alone_and_the_others_get_their_tokens(world: World) -> None:
    good = [world.add(spec_of(f"good {n}", length=7, first=n, max_tokens=9)) for n in range(5)]
    await world.step()
    bad = [world.add(spec_of(f"bad {n}", length=5, first=n, max_tokens=9)) for n in range(4)]
    await run_all(world, breaks("bad 0", "bad 1", "bad 2", "bad 3"))
    assert world.listener.lost == bad
    assert {error.code for error in world.listener.errors} == {StepFailed.code}
    for sequence in good:
        assert sequence.token_ids == answer(sequence.spec, (), 64)[0]
        found = [u.token_ids for u in world.listener.updates if u.sequence is sequence]
        assert [token for tokens in found for token in tokens] == sequence.token_ids[7:]
    assert not world.reasons
    world.check_nothing_is_held()


async def test_an_engine_that_fails_for_every_request_ends_the_worker(world: World) -> None:
    for number in range(6):
        world.add(spec_of(f"r{number}", length=4, first=number))
    while world.thread.plans and not world.reasons:
        world.thread.end(LookupError("a bug\nand where it is"))
        await settle()
    (reason,) = world.reasons
    assert reason == "4 steps in a row have failed, the last one with LookupError: a bug"
    assert len(world.listener.lost) == 3, "the probe runs before the other requests"


async def test_a_step_that_fails_only_for_several_requests_ends_the_worker(world: World) -> None:
    for number in range(3):
        world.add(spec_of(f"r{number}", length=4, first=number, max_tokens=50))
    await run_all(world, lambda _, plan: len(plan.rows) > 1)
    (reason,) = world.reasons
    assert reason.startswith("3 steps in a row have failed, the last one with RuntimeError")
    assert not world.listener.lost


async def test_a_step_that_ends_well_begins_another_row(world: World) -> None:
    for number in range(9):
        world.add(spec_of(f"r{number}", length=8, max_tokens=1))
        if number % 3 == 2:
            await world.step()
        else:
            await world.fail()
    assert not world.reasons
    assert world.core.load().engine_steps == 3


async def test_bad_requests_without_company_end_no_worker(world: World) -> None:
    """One after another, and the same ones again. Probes show that the engine works."""
    for number in range(12):
        world.add(spec_of(f"bad {number % 5}", length=8))
        await run_all(world, breaks(*(f"bad {n}" for n in range(5))))
    assert not world.reasons
    assert len(world.listener.lost) == 12
    assert not world.listener.updates, "the probe is not a request"
    world.check_nothing_is_held()


async def test_gauges_that_cannot_be_refreshed_end_no_worker(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(world.core._gauges, "refresh", lambda *_: 1 / 0)
    for _ in range(5):
        world.core.beat(world.now)
    assert world.reasons == []
    assert caplog.text.count("Traceback") == 1, "the first of a row is logged"
    sequence = world.add(spec_of(length=8))
    assert [row.sequence_id for row in world.plan().rows] == [sequence.sequence_id]


async def test_a_listener_receives_steps_until_it_unsubscribes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(monkeypatch)
    second = Listener()
    unsubscribe = world.core.subscribe(second)
    world.add(spec_of(max_tokens=3))
    await world.step()
    unsubscribe()
    unsubscribe()
    await world.drain()
    assert len(second.updates) == 1
    assert len(world.listener.updates) == 3
    assert world.listener.updates[0] is second.updates[0]


async def test_a_listener_may_unsubscribe_while_it_is_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The other one is called all the same."""
    world = World(monkeypatch)

    class Leaving(Listener):
        def on_emit(self, updates: list[SequenceUpdate]) -> None:
            super().on_emit(updates)
            unsubscribe()

    leaving, last = Leaving(), Listener()
    unsubscribe = world.core.subscribe(leaving)
    world.core.subscribe(last)
    world.add(spec_of(max_tokens=3))
    await world.drain()
    assert len(leaving.updates) == 1
    assert len(last.updates) == 3
