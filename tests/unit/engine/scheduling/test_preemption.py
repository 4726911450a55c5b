"""Which sequence loses its blocks: the cheapest, by priority, and none forever."""

from __future__ import annotations

from collections import deque
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.hashing import hash_key
from baton.request import LOWEST_PRIORITY, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.scheduling.block_pool import (
    CACHED_SHARE,
    PATIENCE,
    BlockPool,
    recompute_cost,
    victim_of,
)
from engine.scheduling.sequence import SchedulerLimits, Sequence
from tests.support.engine.scheduler import World, make_spec

SIZE = 4
CONTEXT = 40


def sequence_of(
    pool: BlockPool, tokens: int, *, priority: int = 0, preemptions: int = 0, found: int = 0
) -> Sequence:
    """One whose KV is all there; of its blocks ``found`` have a hash."""
    spec = replace(make_spec([1] * tokens, max_tokens=9), priority=priority)
    sequence = Sequence(0, replace(spec, preemptions=preemptions), stop_ids=(), hash_key=b"")
    sequence.block_table = (*pool.allocate(-(-tokens // SIZE)),)
    sequence.computed, sequence.registered = tokens, found
    return sequence


def test_the_lowest_priority_goes_first_then_the_cheapest_then_the_latest() -> None:
    pool = BlockPool(64)
    long, short, same = (sequence_of(pool, tokens) for tokens in (20, 8, 8))
    low = sequence_of(pool, 24, priority=3)
    background = sequence_of(pool, 24, priority=LOWEST_PRIORITY)
    assert victim_of([long, short, same, low, background], pool, SIZE) is background
    assert victim_of([low, long, short, same], pool, SIZE) is low
    assert victim_of([long, short, same], pool, SIZE) is same
    assert victim_of([same, short, long], pool, SIZE) is short
    assert victim_of([long], pool, SIZE) is long


def test_preempted_sequences_come_before_new_ones() -> None:
    pool = BlockPool(64)
    often = sequence_of(pool, 4, preemptions=1)
    never = sequence_of(pool, 20)
    assert victim_of([never, often], pool, SIZE) is never
    low = sequence_of(pool, 4, priority=1, preemptions=PATIENCE - 1)
    assert victim_of([never, low], pool, SIZE) is low
    patient = sequence_of(pool, 4, priority=LOWEST_PRIORITY, preemptions=PATIENCE)
    assert victim_of([never, patient], pool, SIZE) is never


def test_cached_blocks_are_cheap_and_shared_ones_free() -> None:
    pool = BlockPool(64)
    plain = sequence_of(pool, 4 * SIZE + 1)
    assert recompute_cost(plain, pool, SIZE) == 4 * SIZE + 1
    found = sequence_of(pool, 4 * SIZE + 1, found=4)
    assert recompute_cost(found, pool, SIZE) == 1 + CACHED_SHARE * 4 * SIZE
    pool.pin(found.block_table[:3])
    assert recompute_cost(found, pool, SIZE) == 1 + CACHED_SHARE * SIZE


class PressureMachine(RuleBasedStateMachine):
    """Ten times more than fits, in whatever order it comes: all end, with the model's tokens.

    What is handed back comes again as from another worker, in its turn, as soon as there is room.
    """

    @initialize(depth=st.integers(1, 2), drafts=st.sampled_from((0, 3)), hand_back=st.booleans())
    def start(self, depth: int, drafts: int, hand_back: bool) -> None:
        limits = SchedulerLimits(SIZE, 16, 6, CONTEXT, draft_tokens=drafts)
        # One of the longest fits, and a little more.
        self.world = World(CONTEXT // SIZE + 2, limits, depth)
        self.hand_back = hand_back
        self.coming: deque[SequenceSpec] = deque()
        self.most = 0
        self.arrived = 0

    @rule(
        lengths=st.lists(st.integers(1, 12), min_size=4, max_size=10),
        tokens=st.integers(6, 28),
        priority=st.sampled_from((0, 0, 1, LOWEST_PRIORITY)),
    )
    def arrive(self, lengths: list[int], tokens: int, priority: int) -> None:
        for length in lengths:
            self.arrived += 1
            # No two share a prefix: nothing is found.
            prompt = [self.arrived % 11, self.arrived // 11 % 11, *range(1, 10), 1][:length]
            spec = SequenceSpec(
                "r",
                0,
                "router",
                tuple(prompt),
                len(prompt),
                SamplingParams(max_tokens=tokens),
                priority=priority,
                hand_back=self.hand_back,
            )
            self.coming.append(spec)

    @precondition(lambda self: self.coming or self.world.steps)
    @rule(steps=st.integers(1, 12))
    def run(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def step(self) -> None:
        world = self.world
        self.let_in()
        while world.scheduler.plans_in_flight < world.depth and world.schedule():
            pass
        if world.steps:
            world.execute()
            world.deliver()
        for lost in world.scheduler.take_handed_back():
            assert self.hand_back
            world.ended[lost] = None
            # Those come before all that are new.
            again = replace(
                lost.spec, token_ids=tuple(lost.token_ids), preemptions=lost.preemptions
            )
            self.coming.appendleft(again)

    def let_in(self) -> None:
        """By the rule of a decode worker's tickets."""
        scheduler = self.world.scheduler
        while self.coming:
            spec = self.coming[0]
            if not self.hand_back:
                self.world.add(self.coming.popleft())
                continue
            if len(spec.token_ids) - spec.prompt_length + 1 == spec.sampling.max_tokens:
                # Its last token is drawn where the prompt is computed.
                self.coming.popleft()
                continue
            here = len(scheduler.running) + len(scheduler.waiting)
            needed = -(-len(spec.token_ids) // SIZE) + here
            if here >= 6 or needed > self.world.pool.available:
                return
            self.world.hand_in(self.coming.popleft())

    @invariant()
    def whole(self) -> None:
        self.world.pool.check()
        for sequence in self.world.sequences.values():
            self.most = max(self.most, sequence.preemptions)

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        for _ in range(200 * (self.arrived + 1)):
            if not (self.coming or self.world.steps) and self.world.scheduler.is_idle():
                break
            self.step()
        self.whole()
        assert not self.coming, "somebody starves"
        self.world.check_answers()
        self.world.check_idle()
        assert self.most <= PATIENCE + 6, "somebody loses its blocks again and again"


PressureMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=12, deadline=None, derandomize=True
)
TestPressure = PressureMachine.TestCase


def test_a_fork_without_a_block_is_handed_back() -> None:
    """It would be computed again in steps with decoding sequences."""
    world = World(4, SchedulerLimits(SIZE, 16, 4, CONTEXT))
    spec = replace(make_spec([1, 2, 3, 4, 5], max_tokens=6), hand_back=True)
    parent, fork = (
        Sequence(number, spec, stop_ids=(), hash_key=hash_key("model"), choice=number)
        for number in range(2)
    )
    parent.siblings = (fork,)
    parent.token_ids.append(7)
    world.pool.allocate(2)
    world.scheduler.add_computed(parent, world.pool.allocate(2), 5)
    assert world.scheduler.fork(parent, [8]) == [fork]
    assert world.scheduler.take_handed_back() == [fork]
    assert world.scheduler.take_handed_back() == []
    assert fork.token_ids[-1] == 8
    assert not world.scheduler.has_preempted


@pytest.mark.parametrize("hand_back", [False, True])
def test_one_without_a_token_is_computed_again_where_it_is(hand_back: bool) -> None:
    """The request for its first token waits for it here."""
    world = World(8, SchedulerLimits(SIZE, 8, 4, CONTEXT))
    spec = replace(make_spec([1] * 20, max_tokens=4), hand_back=hand_back, priority=1)
    world.add(spec)
    world.max_prompt_tokens = 2
    other = world.hand_in(replace(make_spec([2] * 8, max_tokens=20), hand_back=hand_back))
    assert other is not None
    world.run_to_end()
    assert world.scheduler.preemptions > 0
    assert world.scheduler.take_handed_back() == []
    world.check_answers()
    world.check_idle()
