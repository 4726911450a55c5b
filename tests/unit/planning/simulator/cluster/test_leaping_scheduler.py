"""Many identical steps at once leave a scheduler as single steps do."""

from __future__ import annotations

from collections import deque

from hypothesis import given, settings
from hypothesis import strategies as st

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.limits import SchedulerLimits
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.sequence import Sequence
from planning.simulator.cluster.leaping_scheduler import LeapingScheduler

BLOCK = 4
PLENTY = 1000


class Worker:
    """A scheduler with up to two plans in flight. Each token is its sequence's number."""

    def __init__(self, blocks: int, depth: int) -> None:
        limits = SchedulerLimits(BLOCK, 64, 16, PLENTY)
        self.scheduler = LeapingScheduler(BlockPool(blocks), limits)
        self.plans: deque[StepPlan] = deque()
        self.depth = depth
        self.ended: list[int] = []

    def add(self, number: int, prompt: int, answer: int) -> None:
        sampling = SamplingParams(max_tokens=answer, ignore_eos=True)
        spec = SequenceSpec(f"r{number}", 0, "router", (number,) * prompt, prompt, sampling)
        self.scheduler.add(Sequence(number, spec, stop_ids=(), hash_key=b""))
        self.plan()

    def plan(self) -> None:
        while len(self.plans) < self.depth:
            plan = self.scheduler.schedule()
            if plan is None:
                return
            self.plans.append(plan)

    def step(self) -> None:
        plan = self.plans.popleft()
        tokens = tuple((row.sequence_id,) if row.sample else () for row in plan.rows)
        for update in self.scheduler.complete(plan, StepResult(plan.step, tokens, 0.01)):
            if update.sequence.finish_reason:
                self.ended.append(update.sequence.sequence_id)
        self.plan()

    def state(self) -> object:
        scheduler, pool = self.scheduler, self.scheduler.pool
        pool.check()
        return (
            pool.counts(),
            sorted(pool.held_hashes()),
            scheduler.preemptions,
            self.ended,
            [
                (s.sequence_id, s.token_ids, s.computed, s.scheduled, s.pending, s.registered)
                for s in (*scheduler.running, *scheduler.waiting)
            ],
        )


def token_of(sequence: Sequence) -> int:
    return sequence.sequence_id


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 60)), min_size=1, max_size=5),
    st.integers(24, 90),
    st.integers(1, 2),
    st.data(),
)
def test_a_leap_is_as_good_as_its_steps(
    asked: list[tuple[int, int]], blocks: int, depth: int, data: st.DataObject
) -> None:
    stepping, leaping = Worker(blocks, depth), Worker(blocks, depth)
    for number, (prompt, answer) in enumerate(asked):
        for worker in (stepping, leaping):
            worker.add(number, prompt, answer)
    for _ in range(PLENTY):
        if not stepping.plans:
            break
        steps = leaping.scheduler.identical_steps()
        if steps:
            count = data.draw(st.integers(1, steps))
            leaping.scheduler.leap(count, token_of)
        else:
            count = 1
            leaping.step()
        for _ in range(count):
            stepping.step()
        assert leaping.state() == stepping.state()
    assert not leaping.plans
    assert len(stepping.ended) == len(asked)


def test_a_lone_answer_is_one_leap_but_for_its_ends() -> None:
    worker = Worker(blocks=100, depth=1)
    worker.add(7, prompt=8, answer=50)
    worker.step()
    assert worker.scheduler.identical_steps() == 48
    worker.scheduler.leap(48, token_of)
    assert worker.scheduler.identical_steps() == 0
    worker.step()
    assert worker.ended == [7]


def test_blocks_bound_a_leap() -> None:
    worker = Worker(blocks=6, depth=1)
    worker.add(1, prompt=8, answer=50)
    worker.step()
    # 24 tokens have room; the last one's KV is computed by the step after it.
    assert worker.scheduler.identical_steps() == 24 - 9


def test_a_waiting_sequence_ends_the_leaps() -> None:
    worker = Worker(blocks=100, depth=1)
    worker.add(1, prompt=8, answer=50)
    worker.step()
    worker.add(2, prompt=8, answer=50)
    assert worker.scheduler.identical_steps() == 0
