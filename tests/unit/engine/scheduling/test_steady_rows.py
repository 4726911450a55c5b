"""Sequences whose next step needs no check: until when, and with the same results as others."""

from __future__ import annotations

from itertools import pairwise

from engine.scheduling.sequence import SchedulerLimits, Sequence
from tests.support.engine.scheduler import World, make_spec

SIZE = 4


def world_of(*, chunk_tokens: int = 16, depth: int = 2, draft_tokens: int = 0) -> World:
    limits = SchedulerLimits(SIZE, chunk_tokens, 4, 64, draft_tokens=draft_tokens)
    return World(32, limits, depth)


def step(world: World) -> tuple[int, ...]:
    """One step; returns the block table of its first row."""
    plan = world.schedule()
    assert plan is not None
    world.execute()
    world.deliver()
    return plan.rows[0].block_table


def decoding(world: World, prompt: int = 5, max_tokens: int = 20) -> Sequence:
    sequence = world.hand_in(make_spec([1] * prompt, max_tokens=max_tokens))
    assert sequence is not None
    return sequence


def test_a_table_is_the_same_object_until_it_grows() -> None:
    world = world_of()
    sequence = decoding(world)
    tables = [step(world) for _ in range(8)]
    for before, after in pairwise(tables):
        assert (after is before) == (len(after) == len(before))
    assert len(tables[-1]) > len(tables[0])
    assert sequence.block_table is tables[-1]


def test_a_sequence_is_steady_until_it_needs_a_block() -> None:
    world = world_of()
    sequence = decoding(world)
    # It joins the batch with this step.
    step(world)
    assert sequence.steady_until == 0
    step(world)
    assert sequence.steady_until == 2 * SIZE
    while len(sequence.block_table) == 2:
        step(world)
    assert sequence.steady_until == 3 * SIZE


def test_a_sequence_is_steady_until_its_last_token() -> None:
    world = world_of()
    sequence = decoding(world, max_tokens=3)
    step(world)
    assert world.schedule() is not None
    # The token after seven is the eighth and last: prompt and answer together.
    assert sequence.steady_until == 7
    world.run_to_end()
    world.check_answers()
    world.check_idle()


def test_with_drafts_or_after_a_preemption_no_sequence_is_steady() -> None:
    world = world_of(draft_tokens=3)
    drafting = decoding(world)
    step(world)
    step(world)
    assert drafting.steady_until == 0
    world = world_of()
    preempted = decoding(world)
    step(world)
    step(world)
    assert preempted.steady_until
    world.scheduler._preempt(preempted)
    assert preempted.steady_until == 0
    world.run_to_end()
    world.check_answers()


def test_what_is_computed_again_is_no_new_token() -> None:
    """Of two plans in flight, the first computes a token again, and the second the newest."""
    world = world_of(chunk_tokens=1)
    sequence = world.add(make_spec([1], max_tokens=3))
    for _ in range(2):
        step(world)
    world.scheduler._preempt(sequence)
    starts = []
    while world.scheduler.plans_in_flight < 2:
        plan = world.schedule()
        assert plan is not None
        starts += [row.start for row in plan.rows]
        if starts[-1] == 0:
            world.execute()
            world.deliver()
    assert starts == [0, 1, 2]
    world.run_to_end()
    world.check_answers()
    world.check_idle()
