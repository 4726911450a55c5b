"""Several answers from one prompt, in the scheduler's own machine of tests.

To what ``test_scheduler`` checks this adds: forks read what their parent computed, never write into
a block that another sequence has, and a prompt's scores are complete and in order.
"""

from __future__ import annotations

import zlib
from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from baton.hashing import last_hashes
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.scheduling.plan import PlanRow, StepPlan, StepResult
from engine.scheduling.sequence import SchedulerLimits, Sequence, SequenceUpdate
from tests.support.engine.fake_engine import VOCAB, FakeEngine, kv_of
from tests.support.engine.scheduler import (
    KEY,
    PROMPTS,
    STOP_IDS,
    SchedulerMachine,
    World,
)

CONTEXT = 20


def choice_token(
    tokens: list[int], spec: SequenceSpec, stop_ids: tuple[int, ...], choice: int
) -> int:
    """The model: of each choice another one."""
    token = zlib.crc32(bytes(tokens), 77 + choice) % VOCAB
    if len(tokens) - spec.prompt_length < spec.sampling.min_tokens:
        while token in stop_ids:
            token = (token + 1) % VOCAB
    return token


def choice_answer(
    spec: SequenceSpec, stop_ids: tuple[int, ...], choice: int
) -> tuple[list[int], FinishReason]:
    """What a choice must end with."""
    tokens, sampling = list(spec.token_ids), spec.sampling
    while True:
        token = choice_token(tokens, spec, stop_ids, choice)
        tokens.append(token)
        if token in stop_ids and len(tokens) - spec.prompt_length > sampling.min_tokens:
            return tokens, FinishReason.STOP
        if len(tokens) - spec.prompt_length == sampling.max_tokens or len(tokens) == CONTEXT:
            return tokens, FinishReason.LENGTH


def score_of(token: int) -> TokenLogprobs:
    """So that a token shows its choice."""
    return TokenLogprobs(-float(token))


class ChoiceEngine(FakeEngine):
    """Copies blocks, draws several choices from one row, scores prompts."""

    def run(self, plan: StepPlan, *, fail: bool = False) -> StepResult:
        if not fail:
            for source, target in plan.copies:
                self.memory[target] = list(self.memory[source])
        result = super().run(plan, fail=fail)
        rows = list(zip(plan.rows, result.token_ids, strict=True))
        return StepResult(
            result.step,
            result.token_ids,
            result.seconds,
            logprobs=tuple(tuple(map(score_of, tokens)) or None for _, tokens in rows),
            prompt_logprobs=tuple(self._scores(row) for row, _ in rows),
        )

    def _scores(self, row: PlanRow) -> tuple[TokenLogprobs, ...]:
        new, tokens = self._known[row.sequence_id]
        assert row.start + row.scored < new.prompt_length or not row.scored
        return tuple(score_of(tokens[row.start + n + 1]) for n in range(row.scored))

    def _run_row(self, row: PlanRow) -> tuple[int, ...]:
        new, tokens = self._known[row.sequence_id]
        end = row.start + row.count
        kv = kv_of(tokens[:end])
        assert self.read(row.block_table, row.start) == kv[: row.start], "stale or foreign KV"
        self.write(list(row.block_table), row.start, kv[row.start :])
        if not row.sample:
            return ()
        assert end == len(tokens), "a sample before all tokens are computed"
        spec = SequenceSpec("", 0, "", (), new.prompt_length, new.sampling)
        drawn = tuple(
            choice_token(tokens, spec, new.stop_ids, new.choice + n) for n in range(row.choices)
        )
        tokens.append(drawn[0])
        return drawn


class ChoiceWorld(World):
    """Sequences with siblings."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.handed_in: set[Sequence] = set()
        """What others have scored."""
        self.engine = ChoiceEngine(self.blocks, self.limits.block_size)

    def sequence(self, spec: SequenceSpec, stop_ids: tuple[int, ...], **kind: bool) -> Sequence:
        made = [self._made(spec, stop_ids, n, **kind) for n in range(spec.choices)]
        made[0].siblings = tuple(made[1:])
        return made[0]

    def _made(
        self, spec: SequenceSpec, stop_ids: tuple[int, ...], choice: int, **kind: bool
    ) -> Sequence:
        number = len(self.sequences)
        made = Sequence(number, spec, stop_ids=stop_ids, hash_key=KEY, choice=choice, **kind)
        self.sequences[number] = made
        self.computed[number] = 0
        self.reported[number] = []
        return made

    def hand_in(self, spec: SequenceSpec, stop_ids: tuple[int, ...] = ()) -> Sequence | None:
        """As the decode role commits: the first tokens of all choices come along."""
        tokens, size = list(spec.token_ids), self.limits.block_size
        firsts = [choice_token(tokens, spec, stop_ids, n) for n in range(spec.choices)]
        probe = Sequence(0, spec, stop_ids=stop_ids, hash_key=KEY)
        hashes = probe.full_hashes(self.limits.hash_block)
        pinned = self.pool.match(last_hashes(hashes, self.limits.hashes_per_block))
        count = -(-len(tokens) // size) - len(pinned)
        wanted = count + spec.choices - 1
        ends = firsts[0] in stop_ids and not spec.sampling.min_tokens
        room = wanted <= self.pool.available - self.pool.evictable(pinned)
        if (ends and spec.choices == 1) or spec.sampling.max_tokens == 1 or not room:
            return None
        sequence = self.sequence(spec, stop_ids)
        self.handed_in.add(sequence)
        self.pool.pin(pinned)
        blocks = pinned + self.pool.allocate(count)
        start = len(pinned) * size
        self.engine.write(blocks, start, kv_of(tokens)[start:])
        sequence.spare = self.pool.allocate(spec.choices - 1)
        sequence.token_ids.append(firsts[0])
        self.scheduler.add_computed(sequence, blocks, len(tokens))
        forks = self.scheduler.fork(sequence, firsts[1:]) if spec.choices > 1 else []
        if forks:
            sequence.finish_reason = self.scheduler.finish_reason(sequence, firsts[0])
        if sequence.finish_reason:
            self.scheduler.remove(sequence)
        for choice, token in zip((sequence, *forks), firsts, strict=True):
            self.reported[choice.sequence_id].append(token)
            if choice.finish_reason:
                self.ended[choice] = choice.finish_reason
        return sequence

    def check_plan(self, plan: StepPlan) -> None:
        """A block may be pinned as what a fork is filled from: its owner writes behind that."""
        references = self.pool._references
        flights = self.scheduler._plans.values()
        pins = Counter(source for flight in flights for source in flight.copied.values())
        pins.update(s.copy_of for s in self.sequences.values() if s.copy_of is not None)
        for block, count in pins.items():
            assert references[block] >= count, "what is copied from is not pinned"
            references[block] -= count
        try:
            super().check_plan(plan)
        finally:
            for block, count in pins.items():
                references[block] += count
        targets = [target for _, target in plan.copies]
        assert len(targets) == len(set(targets))
        for row in plan.rows:
            assert row.scored <= row.count
        scored = [row.scored for row in plan.rows if row.scored]
        # Behind the bound every prompt still moves on, by a token.
        assert sum(scored) <= self.limits.scored_tokens + scored.count(1)

    def note(self, update: SequenceUpdate) -> None:
        super().note(update)
        assert update.logprobs == tuple(map(score_of, update.token_ids))
        sequence = update.sequence
        if sequence.prefill_only and sequence.choice and update.token_ids:
            # It goes on elsewhere.
            self.ended.setdefault(sequence, None)
        if update.token_ids and sequence.spec.sampling.prompt_logprobs is not None:
            expected = [score_of(token) for token in sequence.spec.token_ids[1:]]
            if sequence.choice == 0 and sequence not in self.handed_in:
                assert sequence.prompt_logprobs == expected

    def lose(self, sequence: Sequence) -> None:
        """Siblings that have not begun never will."""
        for sibling in sequence.siblings:
            self.ended.setdefault(sibling, None)

    def remove(self, sequence: Sequence) -> None:
        self.lose(sequence)
        super().remove(sequence)

    def expire(self, now: float) -> list[Sequence]:
        expired = super().expire(now)
        for sequence in expired:
            self.lose(sequence)
        return expired

    def deliver(self) -> list[SequenceUpdate]:
        updates = super().deliver()
        for sequence in [s for s, reason in self.ended.items() if reason is None]:
            self.lose(sequence)
        return updates

    def check_answers(self) -> None:
        for sequence in self.sequences.values():
            reported = self.reported[sequence.sequence_id]
            tokens, reason = choice_answer(sequence.spec, sequence.stop_ids, sequence.choice)
            start = len(sequence.spec.token_ids)
            if self.ended.get(sequence) is None:
                assert reported == tokens[start:][: len(reported)], "not the model's tokens"
                continue
            assert sequence.token_ids == tokens
            assert reported == tokens[start:]
            assert self.ended[sequence] is reason

    def begun(self) -> list[int]:
        """The numbers of all but siblings that wait for their parent."""
        waiting = {s for sequence in self.sequences.values() for s in sequence.siblings}
        return [n for n, sequence in sorted(self.sequences.items()) if sequence not in waiting]


SAMPLINGS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 9),
    min_tokens=st.sampled_from((0, 0, 3)),
    logprobs=st.just(0),
    prompt_logprobs=st.sampled_from((None, None, 0)),
)


class ChoicesMachine(SchedulerMachine):
    """The same life, for requests of several choices."""

    world: ChoiceWorld

    @initialize(
        block_size=st.integers(1, 4),
        spare=st.integers(0, 8),
        chunk_tokens=st.integers(1, 12),
        max_sequences=st.integers(1, 5),
        depth=st.integers(1, 2),
        scored_tokens=st.integers(1, 6),
    )
    def start(
        self,
        block_size: int,
        spare: int,
        chunk_tokens: int,
        max_sequences: int,
        depth: int,
        scored_tokens: int,
    ) -> None:
        limits = SchedulerLimits(
            block_size, chunk_tokens, max_sequences, CONTEXT, scored_tokens=scored_tokens
        )
        self.world = ChoiceWorld(-(-CONTEXT // block_size) + spare, limits, depth)
        self.outside = []

    @rule(
        prompt=PROMPTS,
        sampling=SAMPLINGS,
        stop_ids=STOP_IDS,
        choices=st.integers(1, 4),
        prefill_only=st.booleans(),
    )
    def add(
        self,
        prompt: list[int],
        sampling: SamplingParams,
        stop_ids: tuple[int, ...],
        choices: int,
        prefill_only: bool,
    ) -> None:
        spec = SequenceSpec("r", 0, "x", tuple(prompt), len(prompt), sampling, choices=choices)
        self.world.add(spec, stop_ids, prefill_only=prefill_only)

    @rule(prompt=PROMPTS, sampling=SAMPLINGS, stop_ids=STOP_IDS, choices=st.integers(1, 4))
    def hand_in(
        self, prompt: list[int], sampling: SamplingParams, stop_ids: tuple[int, ...], choices: int
    ) -> None:
        spec = SequenceSpec("r", 0, "x", tuple(prompt), len(prompt), sampling, choices=choices)
        self.world.hand_in(spec, stop_ids)

    @rule()
    def add_moved(self) -> None:
        """Nothing: what has moved has one choice, and ``test_scheduler`` has it."""

    @rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        if begun := self.world.begun():
            self.world.remove(self.world.sequences[data.draw(st.sampled_from(begun))])

    @rule(data=st.data())
    def expire(self, data: st.DataObject) -> None:
        begun = self.world.begun()
        if not begun:
            return
        sequence = self.world.sequences[data.draw(st.sampled_from(begun))]
        scheduler = self.world.scheduler
        was_there = sequence in scheduler.running or sequence in scheduler.waiting
        sequence.deadline = 1.0
        assert self.world.expire(1.0) == [sequence] * was_there


TestChoices = ChoicesMachine.TestCase
TestChoices.settings = settings(
    max_examples=100, stateful_step_count=40, deadline=None, derandomize=True
)


def make_world(blocks: int, size: int, **limits: int) -> ChoiceWorld:
    fields = {"chunk_tokens": 64, "max_sequences": 8} | limits
    return ChoiceWorld(blocks, SchedulerLimits(size, context_length=CONTEXT, **fields))


def spec_of(length: int, choices: int, **sampling: int) -> SequenceSpec:
    params = SamplingParams(**({"max_tokens": 5, "logprobs": 0} | sampling))  # type: ignore[arg-type]
    prompt = tuple(n % VOCAB for n in range(length))
    return SequenceSpec("r", 0, "x", prompt, length, params, choices=choices)


@pytest.mark.parametrize(("length", "copies"), [(6, 3), (8, 0)])
def test_full_blocks_are_shared_and_the_partial_one_is_copied(length: int, copies: int) -> None:
    world = make_world(16, 4)
    parent = world.add(spec_of(length, 4))
    forks = parent.siblings
    world.schedule()
    world.execute()
    world.deliver()
    full = length // 4
    for fork in forks:
        assert fork.block_table[:full] == parent.block_table[:full]
        assert fork.block_table[full] not in parent.block_table
    assert all(world.pool._references[block] == 4 for block in parent.block_table[:full])
    plan = world.schedule()
    assert plan is not None
    assert len(plan.rows) == 4
    assert len(plan.copies) == copies
    assert {source for source, _ in plan.copies} <= set(parent.block_table)
    world.run_to_end()
    world.check_answers()
    world.check_idle()


def test_a_fork_that_finds_no_block_is_computed_again() -> None:
    world = make_world(5, 4, max_sequences=2)
    world.add(spec_of(9, 4, max_tokens=3))
    world.run_to_end()
    world.check_answers()
    world.check_idle()


def test_what_is_scored_is_not_taken_from_the_cache() -> None:
    world = make_world(16, 4, scored_tokens=3)
    for _ in range(2):
        sequence = world.add(spec_of(11, 2, prompt_logprobs=0))
        world.run_to_end()
        assert sequence.cached_tokens == 0
        assert world.computed[sequence.sequence_id] == 11
        assert [score.logprob for score in sequence.prompt_logprobs] == [
            -float(n % VOCAB) for n in range(1, 11)
        ]
    unscored = world.add(spec_of(11, 2))
    world.run_to_end()
    assert unscored.cached_tokens == 8
    world.check_idle()


def test_a_prefill_is_held_while_any_choice_goes_on() -> None:
    world = make_world(16, 4)
    spec = spec_of(5, 3)
    firsts = [choice_token(list(spec.token_ids), spec, (), n) for n in range(3)]
    assert len(set(firsts)) > 1
    goes_on = world.add(spec, (firsts[0],), prefill_only=True)
    world.run_to_end()
    assert world.scheduler.held == {goes_on}
    assert goes_on.finish_reason is FinishReason.STOP
    world.remove(goes_on)
    ends = world.add(spec, tuple(set(firsts)), prefill_only=True)
    world.run_to_end()
    assert not world.scheduler.held
    assert ends.finish_reason is FinishReason.STOP
    world.check_idle()


def test_scores_of_a_step_outlive_the_blocks_that_are_lost_during_it() -> None:
    """Preempted while the step runs that brings its first token."""
    world = ChoiceWorld(10, SchedulerLimits(2, 4, 5, CONTEXT), depth=2)
    for _ in range(2):
        world.add(spec_of(1, 1, max_tokens=9))
    scored = world.add(spec_of(8, 1, prompt_logprobs=0))
    world.run_to_end()
    assert world.scheduler.preemptions > 0
    assert len(scored.prompt_logprobs) == 7
    world.check_answers()
    world.check_idle()
