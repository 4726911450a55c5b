"""The step scheduler: whatever it batches, preempts, pipelines and drafts, every answer is the
model's.
"""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from baton.errors import InvalidRequest
from baton.hashing import block_hashes
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.sequence import SchedulerLimits
from tests.support.engine.fake_engine import answer, kv_of
from tests.support.engine.scheduler import (
    KEY,
    SchedulerMachine,
    World,
    make_spec,
    make_world,
    random_jobs,
    random_limits,
    run_crowd,
    run_without_a_pause,
)

TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True
)


@settings(deadline=None, derandomize=True, max_examples=300)
@given(st.integers(0, 200_000), st.integers(1, 10_000), st.integers(0, 1 << 22))
def test_a_chunk_is_as_long_as_its_attention_allows(start: int, tokens: int, keys: int) -> None:
    limits = SchedulerLimits(16, tokens, 8, 1 << 20, keys)
    most = limits.max_tokens(start)
    assert 1 <= most <= tokens
    if keys == 0:
        assert most == tokens
        return
    assert most == 1 or most * (start + most) <= keys
    assert most == tokens or (most + 1) * (start + most + 1) > keys


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("batch", range(4))
def test_a_crowd_in_a_small_pool(batch: int, depth: int) -> None:
    """Fixed seeds rather than hypothesis: every run is crowded, most of them preempt."""
    preemptions = accepted = 0
    for seed in range(100 * batch, 100 * (batch + 1)):
        random = Random(seed)
        limits = random_limits(random)
        blocks = -(-limits.context_length // limits.block_size)
        world = World(blocks + random.randrange(3), limits, depth)
        run_crowd(world, random_jobs(random))
        preemptions += world.scheduler.preemptions
        accepted += world.engine.accepted
    assert preemptions > 100, "the pools are too large to test anything"
    assert accepted > 100, "hardly a draft was right"


# What the crowd may miss


@pytest.mark.parametrize("length", range(1, 10))
@pytest.mark.parametrize("depth", [1, 2])
def test_the_last_token_of_a_wholly_cached_prompt_is_computed_in_an_own_block(
    length: int, depth: int
) -> None:
    world = make_world(16, 4, depth=depth)
    prompt = list(range(1, length + 1))
    first = world.add(make_spec(prompt, max_tokens=3))
    world.run_to_end()
    second = world.add(make_spec(prompt, max_tokens=3))
    third = world.add(make_spec(prompt, max_tokens=3))
    world.run_to_end()
    assert first.cached_tokens == 0
    assert second.cached_tokens == third.cached_tokens == (length - 1) // 4 * 4
    assert world.computed[0] == length
    assert world.computed[1] == length - second.cached_tokens
    world.check_answers()
    world.check_idle()


def test_handed_off_blocks_give_way_to_equal_ones() -> None:
    world = make_world(16, 4)
    spec = make_spec([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=4)
    holder = world.add(spec)
    # A handoff that was reserved before anything was held: all its blocks are its own.
    own = world.pool.allocate(3)
    world.engine.write(own, 0, kv_of(list(spec.token_ids)))
    world.run_to_end()
    held = world.pool.match(holder.full_hashes(4)[:2])
    assert not set(held) & set(own)
    sequence = world.sequence(spec, ())
    sequence.token_ids.append(answer(spec, (), 64)[0][9])
    world.reported[sequence.sequence_id].append(sequence.token_ids[-1])
    world.scheduler.add_computed(sequence, list(own), 9)
    assert sequence.block_table == (*held, own[2])
    assert world.pool.counts().used == 3
    run_without_a_pause(world)


def test_blocks_of_several_hash_blocks() -> None:
    """Found whole; the index receives every hash block in them."""
    world = World(16, SchedulerLimits(4, 64, 8, 64, hash_block_size=2))
    first = world.add(make_spec([*range(1, 11)], max_tokens=1))
    world.run_to_end()
    hashes = block_hashes([*range(1, 11)], 2, KEY)
    assert sorted(world.pool.held_hashes()) == sorted(hashes[:4])
    assert world.pool.match([hashes[1], hashes[3]]) != []
    # Six tokens in common: one block, and half of another.
    second = world.add(make_spec([1, 2, 3, 4, 5, 6, 9, 9, 9], max_tokens=1))
    world.run_to_end()
    assert (first.cached_tokens, second.cached_tokens) == (0, 4)
    world.check_answers()
    world.check_idle()


def test_a_block_that_holds_no_whole_hash_blocks_is_refused() -> None:
    with pytest.raises(
        ValueError, match="block_size 6 must be a multiple of the hash block size, 4"
    ):
        SchedulerLimits(6, 64, 8, 64, hash_block_size=4)


def test_handed_off_blocks_become_findable() -> None:
    world = make_world(16, 4)
    world.hand_in(make_spec([1, 2, 3, 4, 5, 6, 7, 8], max_tokens=4))
    sequence = world.add(make_spec([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=2))
    run_without_a_pause(world)
    assert sequence.cached_tokens == 8


def test_one_that_must_give_its_blocks_up_lets_the_next_one_go_on() -> None:
    """Both lack a block; nothing is in flight that would wake the scheduler again."""
    world = make_world(8, 2)
    world.add(make_spec([1] * 9, max_tokens=6))
    world.schedule()
    world.execute()
    world.deliver()
    world.hand_in(make_spec([2] * 6, max_tokens=6))
    run_without_a_pause(world)
    assert world.scheduler.preemptions > 0
    assert world.computed[1] == 0, "what was received is computed again"


def test_those_that_wait_with_blocks_do_not_lock_out_the_first_in_line() -> None:
    world = make_world(6, 2)
    tickets = [make_spec([number] * 6, max_tokens=5) for number in (1, 2)]
    blocks = [world.pool.allocate(3) for _ in tickets]
    world.add(make_spec([3], max_tokens=3))
    assert world.schedule() is None
    for spec, own in zip(tickets, blocks, strict=True):
        world.engine.write(own, 0, kv_of(list(spec.token_ids)))
        sequence = world.sequence(spec, ())
        sequence.token_ids.append(answer(spec, (), 12)[0][6])
        world.reported[sequence.sequence_id].append(sequence.token_ids[-1])
        world.scheduler.add_computed(sequence, own, 6)
    run_without_a_pause(world)


def test_the_latest_arrival_is_preempted_and_comes_back_first() -> None:
    world = make_world(9, 2)
    sequences = [world.hand_in(make_spec([number] * 5, max_tokens=8)) for number in (1, 2, 3)]
    while not world.scheduler.preemptions:
        assert world.schedule() is not None
        world.execute()
        world.deliver()
    newcomer = world.add(make_spec([4], max_tokens=2))
    assert world.scheduler.running == sequences[:2]
    assert list(world.scheduler.waiting) == [sequences[2], newcomer]
    assert world.scheduler.has_preempted
    run_without_a_pause(world)


def test_what_is_in_flight_may_end_before_others_are_preempted() -> None:
    """The blocks of a sequence that has left are on their way: no other need give up its own."""
    world = make_world(6, 2, depth=2)
    leaver = world.hand_in(make_spec([1] * 4, max_tokens=8))
    grower = world.hand_in(make_spec([2] * 5, max_tokens=8))
    assert leaver is not None
    assert grower is not None
    assert world.schedule() is not None
    world.remove(leaver)
    assert world.schedule() is not None or world.steps
    world.run_to_end()
    assert world.scheduler.preemptions == 0
    world.check_answers()
    world.check_idle()


def test_a_prefill_keeps_its_blocks_while_others_run_out_of_theirs() -> None:
    world = make_world(6, 2)
    runner = world.hand_in(make_spec([1] * 5, max_tokens=8))
    prefill = world.add(make_spec([2] * 4, max_tokens=8), prefill_only=True)
    for _ in range(6):
        if world.schedule() is not None:
            world.execute()
            world.deliver()
        world.check_sendable()
    assert runner is not None
    assert runner.preempted
    assert world.scheduler.held == {prefill}
    world.remove(prefill)
    run_without_a_pause(world)


def test_a_prefill_is_held_until_it_is_released() -> None:
    world = make_world(8, 2)
    sequence = world.add(make_spec([1, 2, 3], max_tokens=5), prefill_only=True)
    world.run_to_end()
    assert world.scheduler.held == {sequence}
    assert len(world.reported[0]) == 1
    assert sequence.finish_reason is None
    assert not world.scheduler.is_idle()
    assert world.pool.counts().used == 2
    world.remove(sequence)
    world.remove(sequence)
    world.check_idle()


def test_a_prefill_whose_first_token_is_the_last_is_not_held() -> None:
    world = make_world(8, 2)
    world.add(make_spec([1, 2, 3], max_tokens=1), prefill_only=True)
    run_without_a_pause(world)


def test_chunks_leave_decoding_sequences_their_place() -> None:
    world = make_world(32, 2, chunk=4)
    world.hand_in(make_spec([1] * 5, max_tokens=9))
    world.add(make_spec([2] * 10, max_tokens=2))
    plan = world.schedule()
    assert plan is not None
    # The one that decodes comes first; the other's prompt takes what is left of the budget.
    assert [(row.count, row.sample) for row in plan.rows] == [(1, True), (3, False)]
    world.execute()
    world.deliver()
    run_without_a_pause(world)


def test_aborted_in_flight_keeps_its_blocks_until_the_step_has_ended() -> None:
    world = make_world(4, 2)
    sequence = world.add(make_spec([1, 2, 3], max_tokens=5))
    assert world.schedule() is not None
    world.remove(sequence)
    assert world.pool.counts().used == 2
    assert not world.scheduler.is_idle()
    assert world.schedule() is None
    world.execute()
    assert world.deliver() == []
    world.check_idle()


def alone(plan: StepPlan | None) -> int:
    """The only sequence of a step."""
    assert plan is not None
    (row,) = plan.rows
    return row.sequence_id


def test_after_a_broken_step_each_of_its_sequences_runs_alone() -> None:
    """Only the one that breaks its own step ends. One that comes meanwhile waits for them."""
    world = make_world(16, 2)
    broken = [world.add(make_spec([number], max_tokens=3)) for number in (1, 2, 3)]
    gone = world.add(make_spec([4], max_tokens=3))
    world.schedule()
    world.remove(gone)
    other = world.add(make_spec([5], max_tokens=3))
    world.execute(fail=True)
    assert world.deliver() == []
    for sequence in broken:
        assert sequence not in world.ended
        assert alone(world.schedule()) == sequence.sequence_id
        assert world.schedule() is None, "another step would be in flight"
        bad = sequence is broken[1]
        world.execute(fail=bad)
        world.deliver()
        assert (sequence in world.ended) == bad
    world.ended.pop(broken[1])
    del world.sequences[broken[1].sequence_id]
    run_without_a_pause(world)
    assert world.ended[other] is world.ended[broken[0]] is FinishReason.LENGTH


def test_what_was_planned_behind_a_broken_step_is_not_applied() -> None:
    """A chunk that was computed over the KV of a chunk that is not there."""
    world = make_world(32, 2, chunk=4)
    world.add(make_spec([1], max_tokens=1))
    sequence = world.add(make_spec([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=2))
    first, second = world.schedule(), world.schedule()
    assert first is not None
    assert second is not None
    assert [row.start for row in second.rows] == [first.rows[1].count]
    assert world.scheduler.fail(first) == []
    assert world.schedule() is None
    world.engine.run(first)
    assert world.scheduler.complete(second, world.engine.run(second)) == []
    world.steps.clear()
    assert sequence.computed == 0
    run_without_a_pause(world)


def test_a_row_that_cannot_be_applied_ends_its_sequence_alone() -> None:
    world = make_world(16, 2)
    good, bad, last = (world.add(make_spec([number], max_tokens=3)) for number in (1, 2, 3))
    plan = world.schedule()
    assert plan is not None
    found = world.engine.run(plan).token_ids
    result = StepResult(plan.step, (found[0], ("no token",), found[2]))  # type: ignore[arg-type]
    bad.stop_ids = None  # type: ignore[assignment]
    updates = world.scheduler.complete(plan, result)
    world.steps.clear()
    assert [update.sequence for update in updates] == [good, bad, last]
    assert [type(update.error) for update in updates] == [type(None), TypeError, type(None)]
    for update in (updates[0], updates[2]):
        world.note(update)
    del world.sequences[bad.sequence_id]
    run_without_a_pause(world)


@pytest.mark.parametrize(
    ("prompt", "known", "max_tokens"),
    [([1] * 8, 8, 5), ([1] * 9, 9, 5), ([1, 2], 4, 2), ([1, 2], 5, 2)],
    ids=["context full", "context exceeded", "all generated", "more than all generated"],
)
def test_what_can_never_end_is_refused(prompt: list[int], known: int, max_tokens: int) -> None:
    world = make_world(4, 2)
    tokens = (prompt + [3] * known)[:known]
    spec = SequenceSpec(
        "r", 0, "", tuple(tokens), len(prompt), SamplingParams(max_tokens=max_tokens)
    )
    with pytest.raises(InvalidRequest, match="leave no room to generate"):
        world.scheduler.add(world.sequence(spec, ()))
    assert world.scheduler.is_idle()


def test_waiting_tokens_are_those_before_the_first_sample() -> None:
    world = make_world(32, 2, chunk=4)
    world.add(make_spec([1] * 10, max_tokens=2))
    world.hand_in(make_spec([2] * 5, max_tokens=3))
    assert world.scheduler.waiting_tokens == 10
    world.schedule()
    assert world.scheduler.waiting_tokens == 6


def test_one_preempted_in_flight_waits_for_its_step() -> None:
    world = make_world(4, 2, depth=2)
    outside = world.pool.allocate(2)
    sequence = world.hand_in(make_spec([1] * 3, max_tokens=4))
    assert sequence is not None
    assert world.schedule() is not None
    assert world.schedule() is None
    assert sequence.preempted
    world.pool.release(outside)
    # There is room by now, but its blocks will be released when the step has ended.
    assert world.schedule() is None
    world.execute()
    world.deliver()
    run_without_a_pause(world)
