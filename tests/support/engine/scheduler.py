"""Shared by the tests of scheduler and by other tests."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from baton.hashing import hash_key, last_hashes
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits, Sequence, SequenceUpdate
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
        """A ticket: blocks without a sequence in the scheduler, which other processes write to."""
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


def run_crowd(world: World, jobs: list[Job]) -> None:
    crowd = Crowd(world, jobs)
    turn, last = 0, max(job.arrives for job in jobs)
    while turn <= last or not world.scheduler.is_idle():
        crowd.turn(turn)
        turn += 1
        assert turn < 1000, "it never ends"
    world.check_answers()
    world.check_idle()


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
