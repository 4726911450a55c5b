"""The step scheduler and sequences whose leading blocks were fetched from elsewhere."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from baton.errors import InvalidRequest
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.scheduling.sequence import SchedulerLimits, Sequence
from tests.support.engine.fake_engine import kv_of
from tests.support.engine.scheduler import (
    PROMPTS,
    SAMPLINGS,
    STOP_IDS,
    SchedulerMachine,
    World,
    make_spec,
    make_world,
    run_without_a_pause,
)


class FetchingWorld(World):
    """A world that blocks come to."""

    def fetch(
        self, spec: SequenceSpec, most: int, stop_ids: tuple[int, ...] = (), **kind: bool
    ) -> Sequence | None:
        """Queue a sequence with up to ``most`` blocks behind those held; None without room."""
        sequence = self.sequence(spec, stop_ids, **kind)
        size, tokens = self.limits.block_size, list(spec.token_ids)
        hashes = sequence.full_hashes(size)[: (len(tokens) - 1) // size]
        own = self.pool.match(hashes)
        count = min(most, len(hashes) - len(own))
        if count > self.pool.available - self.pool.evictable(own):
            self.ended[sequence] = None
            return None
        self.pool.pin(own)
        blocks = own + self.pool.allocate(count)
        start, end = len(own) * size, len(blocks) * size
        self.engine.write(blocks, start, kv_of(tokens)[start:end])
        self.scheduler.add(sequence, blocks)
        return sequence

    def check_sendable(self) -> None:
        """One that waits sends nothing: the scheduler may take its blocks back."""
        waiting = set(self.scheduler.waiting)
        for sequence in self.sequences.values():
            if sequence.prefill_only and sequence not in self.ended | dict.fromkeys(waiting):
                kv = kv_of(sequence.token_ids[: sequence.computed])
                assert self.engine.read(sequence.block_table, len(kv)) == kv, "sent KV has changed"
                assert not sequence.preempted


class FetchingMachine(SchedulerMachine):
    """Whatever else arrives and leaves, some have their leading blocks already."""

    @initialize(
        block_size=st.integers(1, 4),
        spare=st.integers(0, 3),
        chunk_tokens=st.integers(1, 12),
        max_sequences=st.integers(1, 5),
        depth=st.integers(1, 2),
    )
    def start(
        self, block_size: int, spare: int, chunk_tokens: int, max_sequences: int, depth: int
    ) -> None:
        limits = SchedulerLimits(block_size, chunk_tokens, max_sequences, context_length=20)
        self.world = FetchingWorld(-(-20 // block_size) + spare, limits, depth)
        self.outside: list[list[int]] = []

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLINGS,
        stop_ids=STOP_IDS,
        most=st.integers(0, 8),
        prefill_only=st.booleans(),
    )
    def fetch(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stop_ids: tuple[int, ...],
        most: int,
        prefill_only: bool,
    ) -> None:
        assert isinstance(self.world, FetchingWorld)
        spec = SequenceSpec("r", 0, "router", tuple(prompt), len(prompt), sampling)
        self.world.fetch(spec, most, stop_ids, prefill_only=prefill_only)


TestFetching = FetchingMachine.TestCase
TestFetching.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, derandomize=True
)


def fetching_world(blocks: int, size: int, **changes: int) -> FetchingWorld:
    world = make_world(blocks, size, **changes)
    return FetchingWorld(world.blocks, world.limits, world.depth)


@pytest.mark.parametrize("length", range(1, 10))
def test_only_what_was_not_fetched_is_computed(length: int) -> None:
    world = fetching_world(16, 4)
    sequence = world.fetch(make_spec(list(range(1, length + 1)), max_tokens=3), most=8)
    assert sequence is not None
    run_without_a_pause(world)
    assert sequence.cached_tokens == (length - 1) // 4 * 4
    assert world.computed[0] == length - sequence.cached_tokens


def test_fetched_blocks_become_findable_and_equal_ones_are_given_back() -> None:
    world = fetching_world(16, 4)
    spec = make_spec([1, 2, 3, 4, 5, 6, 7, 8, 9], max_tokens=2)
    both = [world.sequence(spec, ()) for _ in range(2)]
    # Two that fetch at once: neither finds the other's.
    fetched = [world.pool.allocate(2) for _ in both]
    for sequence, blocks in zip(both, fetched, strict=True):
        world.engine.write(blocks, 0, kv_of(list(spec.token_ids))[:8])
        world.scheduler.add(sequence, blocks)
    assert both[0].block_table == both[1].block_table == (*fetched[0],)
    assert world.pool.counts().used == 2
    assert world.pool.match(both[0].full_hashes(4)[:2]) == fetched[0]
    run_without_a_pause(world)


def test_what_can_never_run_gives_its_blocks_back() -> None:
    world = fetching_world(16, 4)
    prompt = list(range(1, 10))
    spec = SequenceSpec("r", 1, "router", tuple(prompt), 7, SamplingParams(max_tokens=2))
    blocks = world.pool.allocate(2)
    with pytest.raises(InvalidRequest):
        world.scheduler.add(world.sequence(spec, ()), blocks)
    world.check_idle()


def test_those_with_fetched_blocks_do_not_lock_one_another_out() -> None:
    """Each holds what the other lacks, and nothing runs that would end."""
    world = fetching_world(6, 2)
    specs = [make_spec([number] * 9, max_tokens=2) for number in (1, 2)]
    sequences = [world.sequence(spec, (), prefill_only=True) for spec in specs]
    fetched = [world.pool.allocate(3) for _ in specs]
    for spec, sequence, blocks in zip(specs, sequences, fetched, strict=True):
        world.engine.write(blocks, 0, kv_of(list(spec.token_ids))[:6])
        world.scheduler.add(sequence, blocks)
    while len(world.ended) < 2:
        world.run_to_end()
        held = list(world.scheduler.held)
        assert held, "work is stuck"
        for sequence in held:
            world.remove(sequence)
    world.check_answers()
    world.check_idle()


def test_the_blocks_that_those_in_line_want_are_counted() -> None:
    world = fetching_world(8, 2)
    assert world.scheduler.wanted_blocks == 0
    world.add(make_spec([1] * 5, max_tokens=2))
    world.fetch(make_spec([2] * 7, max_tokens=2), most=2)
    assert world.scheduler.wanted_blocks == 3 + 2
    run_without_a_pause(world)
    assert world.scheduler.wanted_blocks == 0
