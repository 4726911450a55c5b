"""Prompts in steps with decoding sequences, deadlines, and what a sequence's steps have taken."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.sequence import SchedulerLimits, Sequence
from tests.support.engine.scheduler import World, make_spec

LIMITS = SchedulerLimits(4, 16, 4, 64)
PROMPT = [1, 2, 3] * 10


def make_world(blocks: int = 64) -> World:
    return World(blocks, LIMITS)


def decoding(world: World, tokens: int = 30) -> Sequence:
    """A handed-off sequence that has joined."""
    sequence = world.hand_in(make_spec([5, 4, 3], max_tokens=tokens))
    assert sequence is not None
    step(world)
    return sequence


def step(world: World, most: int | None = None) -> StepPlan:
    world.max_prompt_tokens = most
    plan = world.schedule()
    assert plan is not None
    world.execute()
    world.deliver()
    return plan


def counts(plan: StepPlan) -> dict[int, int]:
    return {row.sequence_id: row.count for row in plan.rows}


def test_a_prompt_is_chunked_while_a_sequence_decodes() -> None:
    world = make_world()
    first = decoding(world)
    prompt = world.add(make_spec(PROMPT, max_tokens=2))
    found = [counts(step(world, 8)) for _ in range(4)]
    number = prompt.sequence_id
    assert [plan[number] for plan in found] == [8, 8, 8, 6]
    assert all(plan[first.sequence_id] == 1 for plan in found), "a step without its token"
    assert counts(step(world, 8)) == {first.sequence_id: 1, number: 1}
    world.run_to_end()
    world.check_answers()


def test_without_a_bound_a_prompt_takes_whole_chunks() -> None:
    world = make_world()
    prompt = world.add(make_spec(PROMPT, max_tokens=2))
    assert [counts(step(world))[prompt.sequence_id] for _ in range(2)] == [16, 14]


def test_two_prompts_share_the_bound_in_their_order() -> None:
    world = make_world()
    decoding(world)
    one = world.add(make_spec(PROMPT[:6], max_tokens=2))
    two = world.add(make_spec(PROMPT, max_tokens=2))
    plan = counts(step(world, 8))
    assert (plan[one.sequence_id], plan[two.sequence_id]) == (6, 2)


def test_a_handoff_joins_before_prompts_that_must_wait() -> None:
    """The first prompt uses the bound up: who only decodes need not wait behind the second."""
    world = make_world()
    decoding(world)
    first = world.add(make_spec(PROMPT, max_tokens=2))
    step(world, 4)
    second = world.add(make_spec([7] * 20, max_tokens=2))
    joins = world.hand_in(make_spec([9, 9, 9], max_tokens=5))
    assert joins is not None
    plan = counts(step(world, 4))
    assert plan[first.sequence_id] == 4
    assert plan[joins.sequence_id] == 1
    assert second.sequence_id not in plan
    assert not second.block_table
    world.run_to_end()
    world.check_answers()


def test_what_a_prompt_took_is_counted_by_its_share_of_the_steps() -> None:
    world = make_world()
    decoding(world)
    prompt = world.add(make_spec(PROMPT[:10], max_tokens=9))
    for seconds in (0.9, 0.7, 5.0):
        plan = world.scheduler.schedule(8)
        assert plan is not None
        result = world.engine.run(plan)
        timed = StepResult(result.step, result.token_ids, seconds)
        world.scheduler.complete(plan, timed)
    assert prompt.computed_here == 10
    # 8 of 9 tokens, then 2 of 3; what it generates is not counted.
    assert prompt.compute_s == pytest.approx(0.8 + 0.7 * 2 / 3)


def test_of_a_cached_prefix_nothing_is_counted() -> None:
    world = make_world()
    world.add(make_spec(PROMPT, max_tokens=1))
    world.run_to_end()
    again = world.add(make_spec(PROMPT, max_tokens=1))
    world.run_to_end()
    assert (again.cached_tokens, again.computed_here) == (28, 2)


def test_nothing_is_computed_after_the_deadline() -> None:
    world = make_world()
    running, waiting = decoding(world), world.add(make_spec(PROMPT, max_tokens=2))
    running.deadline, waiting.deadline = 5.0, 6.0
    assert world.expire(4.9) == []
    assert world.expire(5.0) == [running]
    plan = counts(step(world))
    assert running.sequence_id not in plan
    assert world.expire(6.0) == [waiting]
    assert world.schedule() is None
    world.check_idle()


def test_a_deadline_that_passes_in_a_step_frees_the_blocks_with_its_end() -> None:
    world = make_world()
    sequence = decoding(world)
    sequence.deadline = 5.0
    plan = world.schedule()
    assert plan is not None
    assert world.expire(5.0) == [sequence]
    assert world.pool.counts().used > 0, "the engine may still write to them"
    world.execute()
    assert world.deliver() == []
    world.check_idle()


def test_a_preempted_sequence_expires_too() -> None:
    world = make_world(blocks=5)
    one, two = (world.hand_in(make_spec([n] * 7, max_tokens=12)) for n in (1, 2))
    assert one is not None
    assert two is not None
    while not world.scheduler.has_preempted:
        step(world)
    two.deadline = 1.0
    assert two.preempted
    assert world.expire(1.0) == [two]
    world.run_to_end()
    world.check_answers()
    world.check_idle()


def test_the_first_token_comes_alone() -> None:
    """Also of a prompt of one token, which is computed like the tokens behind it."""
    world = World(64, replace(LIMITS, draft_tokens=5))
    one = world.add(make_spec([1], max_tokens=9))
    moved = world.hand_in(make_spec([5, 4, 3], max_tokens=9))
    assert moved is not None
    limits = {row.sequence_id: row.limit for row in step(world).rows}
    # A handoff comes with its first token; the last of its tokens has room in its one block.
    assert limits == {one.sequence_id: 0, moved.sequence_id: 5}
    limits = {row.sequence_id: row.limit for row in step(world).rows}
    assert limits == {one.sequence_id: 9, moved.sequence_id: 12}


def test_a_request_without_speculation_is_not_drafted_for() -> None:
    world = World(64, replace(LIMITS, draft_tokens=5))
    specs = (make_spec([5, 4, 3], max_tokens=9), make_spec([6, 4, 3], max_tokens=9))
    drafted = world.hand_in(specs[0])
    plain = world.hand_in(replace(specs[1], without_speculation=True))
    assert drafted is not None
    assert plain is not None
    limits = {row.sequence_id: row.limit for row in step(world).rows}
    assert limits == {drafted.sequence_id: 5, plain.sequence_id: 0}
    world.run_to_end()
    world.check_answers()


def test_room_for_drafts_is_not_taken_from_others() -> None:
    """With few blocks left a sequence drafts in those that it has."""
    world = World(3, replace(LIMITS, block_size=4, draft_tokens=8, context_length=12))
    first, second = (world.hand_in(make_spec([n], max_tokens=9)) for n in (1, 2))
    assert first is not None
    assert second is not None
    world.engine.draft_tokens = 0
    step(world)
    plan = step(world)
    assert [len(row.block_table) for row in plan.rows] == [1, 1]
    assert [row.limit for row in plan.rows] == [5, 5]
