"""The step scheduler: whatever it batches, preempts, pipelines and drafts, every answer is the

model's.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.errors import InvalidRequest
from baton.hashing import block_hashes, hash_key, last_hashes
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence, SequenceUpdate
from tests.support.engine.fake_engine import VOCAB, FakeEngine, answer, kv_of, next_token

KEY = hash_key("model")


def make_spec(prompt: list[int], **sampling: object) -> SequenceSpec:
    params = SamplingParams(**sampling)  # type: ignore[arg-type]
    return SequenceSpec("r", 0, "router", tuple(prompt), len(prompt), params)


@dataclass(eq=False)
class Step:
    """A plan in flight."""

    plan: StepPlan
    result: StepResult | None = None
    failed: bool = False


@dataclass
class World:
    """A scheduler, its pool and its engine; checks every plan and every update."""

    blocks: int
    limits: SchedulerLimits
    depth: int = 1
    ended: dict[Sequence, FinishReason | None] = field(default_factory=dict)
    sequences: dict[int, Sequence] = field(default_factory=dict)
    computed: dict[int, int] = field(default_factory=dict)
    reported: dict[int, list[int]] = field(default_factory=dict)
    max_prompt_tokens: int | None = None

    def __post_init__(self) -> None:
        self.pool = BlockPool(self.blocks)
        self.scheduler = Scheduler(self.pool, self.limits)
        self.engine = FakeEngine(self.blocks, self.limits.block_size, self.limits.draft_tokens)
        self.steps: deque[Step] = deque()

    # Joining

    def sequence(self, spec: SequenceSpec, stop_ids: tuple[int, ...], **kind: bool) -> Sequence:
        number = len(self.sequences)
        made = Sequence(number, spec, stop_ids=stop_ids, hash_key=KEY, **kind)
        self.sequences[number] = made
        self.computed[number] = 0
        self.reported[number] = []
        return made

    def add(self, spec: SequenceSpec, stop_ids: tuple[int, ...] = (), **kind: bool) -> Sequence:
        sequence = self.sequence(spec, stop_ids, **kind)
        self.scheduler.add(sequence)
        return sequence

    def hand_in(self, spec: SequenceSpec, stop_ids: tuple[int, ...] = ()) -> Sequence | None:
        """A handoff: the prompt's KV is pinned or received, its first token comes along."""
        tokens, size = list(spec.token_ids), self.limits.block_size
        first = next_token(tokens, spec.prompt_length, spec.sampling.min_tokens, stop_ids)
        ends = first in stop_ids and not spec.sampling.min_tokens
        if ends or spec.sampling.max_tokens == 1:
            return None
        sequence = self.sequence(spec, stop_ids)
        hashes = sequence.full_hashes(self.limits.hash_block)
        pinned = self.pool.match(last_hashes(hashes, self.limits.hashes_per_block))
        count = -(-len(tokens) // size) - len(pinned)
        if count > self.pool.available - self.pool.evictable(pinned):
            self.ended[sequence] = None
            return None
        self.pool.pin(pinned)
        blocks = pinned + self.pool.allocate(count)
        start = len(pinned) * size
        self.engine.write(blocks, start, kv_of(tokens)[start:])
        sequence.token_ids.append(first)
        self.reported[sequence.sequence_id].append(first)
        self.scheduler.add_computed(sequence, blocks, len(tokens))
        return sequence

    # Running

    def schedule(self) -> StepPlan | None:
        plan = self.scheduler.schedule(self.max_prompt_tokens)
        if plan is not None:
            self.check_plan(plan)
            self.steps.append(Step(plan))
        return plan

    def check_plan(self, plan: StepPlan) -> None:
        assert plan.rows
        assert plan.tokens <= self.limits.chunk_tokens
        assert len(plan.rows) <= self.limits.max_sequences
        if self.max_prompt_tokens is not None:
            chunks = sum(row.count for row in plan.rows if row.count > 1)
            assert chunks <= self.max_prompt_tokens
        assert len({row.sequence_id for row in plan.rows}) == len(plan.rows)
        written: set[int] = set()
        size = self.limits.block_size
        for row in plan.rows:
            assert row.count > 0
            for block in row.block_table:
                assert self.pool._references[block] > 0, "a row names a block that is not in use"
            assert row.limit == 0 or row.limit >= row.start + 2, "a step brings at least one token"
            tokens = max(row.start + row.count, row.limit - 1)
            assert tokens <= len(row.block_table) * size, "a row without room for its tokens"
            last = (tokens - 1) // size
            for block in row.block_table[row.start // size : last + 1]:
                assert self.pool._references[block] == 1, "a row writes into a shared block"
                assert block not in self.pool._hash_of, "a row writes into a registered block"
                assert block not in written, "two rows write into one block"
                written.add(block)

    def execute(self, *, fail: bool = False) -> bool:
        """Run the oldest plan that has not run."""
        step = next((s for s in self.steps if s.result is None and not s.failed), None)
        if step is None:
            return False
        try:
            step.result = self.engine.run(step.plan, fail=fail)
        except RuntimeError:
            step.failed = True
        return True

    def deliver(self) -> list[SequenceUpdate]:
        """Bring the oldest result home."""
        step = self.steps[0]
        if step.result is None and not step.failed:
            return []
        self.steps.popleft()
        if step.failed:
            for sequence in self.scheduler.fail(step.plan):
                self.ended[sequence] = None
            return []
        assert step.result is not None
        updates = self.scheduler.complete(step.plan, step.result)
        for update in updates:
            self.note(update)
        return updates

    def note(self, update: SequenceUpdate) -> None:
        sequence = update.sequence
        assert sequence not in self.ended, "a sequence is reported after its end"
        number = sequence.sequence_id
        self.reported[number].extend(update.token_ids)
        self.computed[number] += update.computed_prompt_tokens
        if sequence.finish_reason:
            self.ended[sequence] = sequence.finish_reason

    def remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.ended.setdefault(sequence, None)

    def expire(self, now: float) -> list[Sequence]:
        expired = self.scheduler.expire(now)
        for sequence in expired:
            self.ended.setdefault(sequence, None)
        return expired

    def run_to_end(self) -> None:
        """Pump, execute and deliver until nothing is left but what is held."""
        for _ in range(10_000):
            while self.scheduler.plans_in_flight < self.depth and self.schedule():
                pass
            if not self.steps:
                return
            self.execute()
            self.deliver()
        raise AssertionError("it never ends")

    # Checks

    def check_answers(self) -> None:
        for sequence in self.sequences.values():
            number = sequence.sequence_id
            tokens, reason = answer(sequence.spec, sequence.stop_ids, self.limits.context_length)
            start = len(sequence.spec.token_ids)
            if self.ended.get(sequence) is None:
                expected = tokens[start:][: len(self.reported[number])]
                assert self.reported[number] == expected, "not the model's tokens"
                continue
            assert sequence.token_ids == tokens
            assert self.reported[number] == tokens[start:]
            assert self.ended[sequence] is reason

    def check_sendable(self) -> None:
        """What a prefill has computed may be on its way to another worker at any time."""
        for sequence in self.sequences.values():
            if sequence.prefill_only and sequence not in self.ended:
                kv = kv_of(sequence.token_ids[: sequence.computed])
                assert self.engine.read(sequence.block_table, len(kv)) == kv, "sent KV has changed"
                assert not sequence.preempted

    def check_idle(self) -> None:
        assert self.scheduler.is_idle()
        self.pool.check()
        counts = self.pool.counts()
        assert counts.used == counts.quarantined == 0, counts
        assert self.scheduler.waiting_tokens == 0
        assert not self.scheduler.has_preempted


PROMPTS = st.one_of(
    # Many share a prefix, so that the cache is hit; lengths meet every block boundary.
    st.builds(lambda a, n: ([a, *range(1, 10)] * 3)[:n], st.integers(0, 1), st.integers(1, 14)),
    st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=14),
)
SAMPLINGS = st.builds(
    SamplingParams, max_tokens=st.integers(1, 9), min_tokens=st.sampled_from((0, 0, 3))
)
STOP_IDS = st.sampled_from(((), (0,), (0, 3, 5)))


class SchedulerMachine(RuleBasedStateMachine):
    """Arrivals, handoffs, aborts, failures, up to two plans in flight, results that come late."""

    @initialize(
        block_size=st.integers(1, 4),
        spare=st.integers(0, 3),
        chunk_tokens=st.integers(1, 12),
        max_sequences=st.integers(1, 5),
        depth=st.integers(1, 2),
        hash_block_size=st.integers(0, 1),
        draft_tokens=st.sampled_from((0, 1, 3, 8)),
    )
    def start(
        self,
        block_size: int,
        spare: int,
        chunk_tokens: int,
        max_sequences: int,
        depth: int,
        hash_block_size: int,
        draft_tokens: int,
    ) -> None:
        blocks = -(-20 // block_size) + spare
        limits = SchedulerLimits(
            block_size,
            chunk_tokens,
            max_sequences,
            20,
            hash_block_size=hash_block_size,
            draft_tokens=draft_tokens,
        )
        self.world = World(blocks, limits, depth)
        self.outside: list[list[int]] = []

    @rule(prompt=PROMPTS, sampling=SAMPLINGS, stop_ids=STOP_IDS, prefill_only=st.booleans())
    def add(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stop_ids: tuple[int, ...],
        prefill_only: bool,
    ) -> None:
        spec = SequenceSpec("r", 0, "router", tuple(prompt), len(prompt), sampling)
        self.world.add(spec, stop_ids, prefill_only=prefill_only)

    @rule(prompt=PROMPTS, sampling=SAMPLINGS, stop_ids=STOP_IDS, moved=st.integers(0, 4))
    def add_moved(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stop_ids: tuple[int, ...],
        moved: int,
    ) -> None:
        """A sequence that ran elsewhere before: some of its tokens are output already."""
        spec = SequenceSpec("r", 0, "router", tuple(prompt), len(prompt), sampling)
        tokens, _ = answer(spec, stop_ids, 20)
        known = tokens[: min(len(prompt) + moved, len(tokens) - 1)]
        spec = SequenceSpec("r", 1, "router", tuple(known), len(prompt), sampling)
        self.world.add(spec, stop_ids)

    @rule(prompt=PROMPTS, sampling=SAMPLINGS, stop_ids=STOP_IDS)
    def hand_in(
        self, prompt: list[int], sampling: SamplingParams, stop_ids: tuple[int, ...]
    ) -> None:
        spec = SequenceSpec("r", 0, "router", tuple(prompt), len(prompt), sampling)
        self.world.hand_in(spec, stop_ids)

    @precondition(lambda self: self.world.sequences)
    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        number = data.draw(st.sampled_from(sorted(self.world.sequences)))
        self.world.remove(self.world.sequences[number])

    @precondition(lambda self: self.world.sequences)
    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        sequence = self.world.sequences[data.draw(st.sampled_from(sorted(self.world.sequences)))]
        scheduler = self.world.scheduler
        was_there = sequence in scheduler.running or sequence in scheduler.waiting
        sequence.deadline = 1.0
        assert self.world.expire(1.0) == [sequence] * was_there

    @rule(tokens=st.none() | st.integers(1, 6))
    def bound_prompts(self, tokens: int | None) -> None:
        """Others that decode leave so much time for prompts."""
        self.world.max_prompt_tokens = tokens

    @rule(count=st.integers(1, 5))
    def take_blocks(self, count: int) -> None:
        """A ticket: blocks that are nobody's in the scheduler, and that others write to."""
        if count <= self.world.pool.available:
            blocks = self.world.pool.allocate(count)
            self.world.engine.write(blocks, 0, [-1] * count * self.world.limits.block_size)
            self.outside.append(blocks)

    @precondition(lambda self: self.outside)
    @rule()
    def give_back_blocks(self) -> None:
        self.world.pool.release(self.outside.pop())

    @precondition(lambda self: self.world.scheduler.plans_in_flight < self.world.depth)
    @rule()
    def schedule(self) -> None:
        scheduler = self.world.scheduler
        if self.world.schedule() is None and not self.world.steps:
            waits_for_others = scheduler.held or self.outside
            assert waits_for_others or scheduler.is_idle(), "work is left and nothing is planned"

    @rule(turns=st.integers(1, 6), late=st.booleans())
    def run(self, turns: int, late: bool) -> None:
        """Some steps as the engine core takes them; results come late when two are in flight."""
        for _ in range(turns):
            while self.world.scheduler.plans_in_flight < self.world.depth:
                if self.world.schedule() is None:
                    break
            if self.world.steps:
                self.world.execute()
                self.world.deliver()
            if late:
                self.world.execute()

    @rule()
    def execute(self) -> None:
        self.world.execute()

    @precondition(lambda self: self.world.steps)
    @rule()
    def deliver(self) -> None:
        self.world.deliver()

    @precondition(lambda self: self.world.steps)
    @rule()
    def fail(self) -> None:
        self.world.execute(fail=True)

    @invariant()
    def adds_up(self) -> None:
        world = self.world
        world.pool.check()
        scheduler = world.scheduler
        assert len(scheduler.running) <= world.limits.max_sequences
        assert scheduler.waiting_tokens >= 0
        places = [*scheduler.running, *scheduler.waiting, *scheduler.held]
        assert len(places) == len(set(places)), "a sequence is in two places"
        world.check_sendable()

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        for blocks in self.outside:
            world.pool.release(blocks)
        while not world.scheduler.is_idle():
            before = len(world.ended)
            world.run_to_end()
            held = list(world.scheduler.held)
            for sequence in held:
                assert len(world.reported[sequence.sequence_id]) == 1
                world.remove(sequence)
            moved = held or len(world.ended) > before
            assert moved or world.scheduler.is_idle(), "work is stuck"
        assert len(world.ended) == len(world.sequences)
        world.check_answers()
        world.check_idle()
        if world.scheduler.preemptions == 0:
            for sequence in world.sequences.values():
                if world.ended[sequence] is not None and sequence.cached_tokens == 0:
                    most = sequence.prompt_length
                    assert world.computed[sequence.sequence_id] in (0, most)


TestScheduler = SchedulerMachine.TestCase
TestScheduler.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, derandomize=True
)


@dataclass(frozen=True)
class Job:
    """A sequence that arrives at a turn, and may be aborted at a later one."""

    arrives: int
    kind: str
    prompt: list[int]
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    leaves_after: int | None


def random_jobs(random: Random) -> list[Job]:
    """Alike in length, so that they meet in the pool; many share their first tokens."""
    return [
        Job(
            arrives=random.randrange(10),
            kind=random.choice(("add", "hand in", "hand in", "prefill only")),
            prompt=([random.randrange(3), *range(1, 10)] * 2)[: random.randint(1, 11)],
            sampling=SamplingParams(
                max_tokens=random.choice((1, 8, 11, 14)), min_tokens=random.choice((0, 9))
            ),
            stop_ids=random.choice(((), (), (0,))),
            leaves_after=random.choice((None, None, None, random.randrange(8))),
        )
        for _ in range(random.randint(4, 10))
    ]


def random_limits(random: Random) -> SchedulerLimits:
    return SchedulerLimits(
        block_size=random.randint(1, 4),
        chunk_tokens=random.choice((3, 8, 40)),
        max_sequences=random.choice((2, 4, 6)),
        context_length=20,
        chunk_keys=random.choice((0, 10, 60)),
        hash_block_size=random.choice((0, 1)),
        draft_tokens=random.choice((0, 2, 5)),
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


class Crowd:
    """Jobs in a pool that is too small for them: runs them turn by turn."""

    def __init__(self, world: World, jobs: list[Job]) -> None:
        self.world = world
        self.jobs = jobs
        self.made: dict[int, tuple[Sequence, int]] = {}
        self.held_since: dict[Sequence, int] = {}

    def arrive(self, turn: int) -> None:
        for number, job in enumerate(self.jobs):
            if number in self.made or job.arrives > turn:
                continue
            spec = SequenceSpec("r", 0, "", tuple(job.prompt), len(job.prompt), job.sampling)
            if job.kind == "hand in":
                made = self.world.hand_in(spec, job.stop_ids)
            else:
                prefill = job.kind == "prefill only"
                made = self.world.add(spec, job.stop_ids, prefill_only=prefill)
            if made is not None:
                self.made[number] = (made, turn)

    def leave(self, turn: int) -> None:
        for number, (sequence, since) in self.made.items():
            leaves_after = self.jobs[number].leaves_after
            if leaves_after is not None and since + leaves_after <= turn:
                self.world.remove(sequence)
        for sequence in list(self.world.scheduler.held):
            # Its blocks are sent for a while before they are given back.
            self.held_since.setdefault(sequence, turn)
            if turn - self.held_since[sequence] >= 3:
                self.world.remove(sequence)

    def turn(self, turn: int) -> None:
        self.arrive(turn)
        self.world.max_prompt_tokens = (None, 1, 3)[turn % 3]
        while self.world.scheduler.plans_in_flight < self.world.depth and self.world.schedule():
            pass
        self.leave(turn)
        self.world.execute()
        if self.world.steps:
            self.world.deliver()
        self.world.pool.check()
        self.world.check_sendable()


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


def run_crowd(world: World, jobs: list[Job]) -> None:
    crowd = Crowd(world, jobs)
    turn, last = 0, max(job.arrives for job in jobs)
    while turn <= last or not world.scheduler.is_idle():
        crowd.turn(turn)
        turn += 1
        assert turn < 1000, "it never ends"
    world.check_answers()
    world.check_idle()


# What the crowd may miss


def make_world(
    blocks: int, size: int, *, chunk: int = 64, sequences: int = 8, depth: int = 1
) -> World:
    return World(blocks, SchedulerLimits(size, chunk, sequences, blocks * size), depth)


def run_without_a_pause(world: World) -> None:
    """As the engine core does: once nothing is planned, nothing may be left."""
    while not world.scheduler.is_idle():
        assert world.schedule() is not None, "work is left and nothing is planned"
        world.execute()
        world.deliver()
    world.check_answers()
    world.check_idle()


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
    assert sequence.block_table == [*held, own[2]]
    assert world.pool.counts().used == 3
    run_without_a_pause(world)


def test_blocks_of_several_hash_blocks() -> None:
    """Found whole; the index is told of every hash block in them."""
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
    with pytest.raises(ValueError, match="6 tokens holds no whole hash blocks of 4"):
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
    """The blocks of a sequence that has left are on their way: nobody else need give up his."""
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


def test_a_broken_step_ends_its_sequences_and_no_others() -> None:
    world = make_world(16, 2)
    broken = [world.add(make_spec([number], max_tokens=3)) for number in (1, 2)]
    gone = world.add(make_spec([3], max_tokens=3))
    world.schedule()
    world.remove(gone)
    other = world.add(make_spec([4], max_tokens=3))
    world.execute(fail=True)
    step = world.steps.popleft()
    assert world.scheduler.fail(step.plan) == broken
    world.ended.update(dict.fromkeys(broken))
    run_without_a_pause(world)
    assert world.ended[other] is FinishReason.LENGTH


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
    with pytest.raises(InvalidRequest, match="leave nothing to generate"):
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
