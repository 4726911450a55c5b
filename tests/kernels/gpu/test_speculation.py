"""Drafts on the GPU's runner: steps overlap, wait or check drafts, and no answer changes.

The step model is torch here; ``steps/test_drafts.py`` has the kernels.
"""

from __future__ import annotations

import queue
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings, make_sequence
from engine.execution.runner import Ending
from engine.gpu.runner import GpuRunner
from engine.gpu.speculation import (
    OverlapSpeculation,
    make_overlap_speculation,
    verification_rows,
)
from engine.offline import compile_grammar
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import PlanRow, StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as EngineSequence
from engine.speculation.speculation import MAX_DRAFT_TOKENS, Draft, Drafter
from tests.kernels.gpu.torch_steps import TorchSteps
from tests.support.engine.drafters import Oracle, WholeDrafts, known_as
from tests.support.engine.speculation import (
    GREEDY,
    PROMPTS,
    SAMPLINGS,
    SEEDED,
    some_tokens,
)
from tests.support.kernels.speculation import AnyCosts
from tests.support.models import VOCAB, make_tiny_model
from worker.core.engine_thread import EngineThread

WRONG = (0.0, 1.0, 0.3)


@dataclass
class Answer:
    """Of one run."""

    engine: Engine
    sequences: list[EngineSequence]
    steps: TorchSteps
    drafted: int = 0
    accepted: int = 0

    @property
    def outcome(self) -> list[Any]:
        return [(sequence.token_ids, sequence.finish_reason) for sequence in self.sequences]


class GpuBench:
    """One model; each run has a runner, a scheduler and a pool of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.built = build_engine(
            EngineSettings(folder, device="cpu", threads=1, kv_pool_bytes=2 << 20, **settings)
        )

    def run(
        self,
        prompts: Sequence[list[int]],
        samplings: Sequence[SamplingParams],
        drafter: Drafter | None = None,
        *,
        depth: int = 2,
        blocks: int = 64,
        slow: bool = True,
        **limits: Any,
    ) -> Answer:
        """With the drafts that ``drafter`` makes, all of them; ``slow``: see ``TorchSteps``."""
        built = self.built
        steps = TorchSteps(built.runner.model, 200, slow=slow)
        speculation = OverlapSpeculation(drafter, WholeDrafts(), AnyCosts()) if drafter else None
        runner = GpuRunner(
            steps,  # type: ignore[arg-type]
            built.cache,
            built.runner.device,
            built.config.vocab_size,
            speculation,
        )
        draft_tokens = MAX_DRAFT_TOKENS if drafter else 0
        return self.run_on(
            runner, steps, prompts, samplings, depth, blocks, draft_tokens=draft_tokens, **limits
        )

    def run_on(
        self,
        runner: GpuRunner,
        steps: TorchSteps,
        prompts: Sequence[list[int]],
        samplings: Sequence[SamplingParams],
        depth: int = 2,
        blocks: int = 64,
        **limits: Any,
    ) -> Answer:
        """All prompts together, up to ``depth`` steps begun before the first is waited for."""
        pool = BlockPool(blocks)
        changed = replace(self.built.scheduler.limits, **limits)
        engine = replace(self.built, runner=runner, pool=pool, scheduler=Scheduler(pool, changed))
        answer = Answer(engine, _add(engine, prompts, samplings), steps)
        for plan, ending in _in_flight(engine, depth):
            result = ending()
            assert result.seconds >= 0
            engine.scheduler.complete(plan, result)
            answer.drafted += result.drafted
            answer.accepted += result.accepted
        assert engine.scheduler.is_idle()
        engine.pool.check()
        return answer


def _add(
    engine: Engine, prompts: Sequence[list[int]], samplings: Sequence[SamplingParams]
) -> list[EngineSequence]:
    sequences = []
    for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
        spec = SequenceSpec(f"{number}", 0, "", tuple(prompt), len(prompt), sampling)
        sequences.append(make_sequence(engine, number, spec))
        compile_grammar(engine, sequences[-1])
        engine.scheduler.add(sequences[-1])
    return sequences


def _in_flight(engine: Engine, depth: int) -> Iterator[tuple[StepPlan, Ending]]:
    flight: deque[tuple[StepPlan, Ending]] = deque()
    while True:
        while len(flight) < depth and (plan := engine.scheduler.schedule()) is not None:
            flight.append((plan, engine.runner.start(plan)))
        if not flight:
            return
        yield flight.popleft()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> GpuBench:
    """In fp32, by torch."""
    return GpuBench(make_tiny_model(tmp_path_factory.mktemp("plain")), dtype="float32")


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> GpuBench:
    """In bf16, by the CPU's own decoder: the same bits in every batch, as on a GPU with
    ``deterministic``.
    """
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    folder = make_tiny_model(tmp_path_factory.mktemp("exact"), head_dim=16)
    return GpuBench(folder, deterministic=True)


@pytest.fixture(params=["plain", "exact"])
def bench(request: pytest.FixtureRequest) -> GpuBench:
    found: GpuBench = request.getfixturevalue(request.param)
    return found


def oracle(answer: Answer, wrong: float) -> Oracle:
    answers = {n: sequence.token_ids for n, sequence in enumerate(answer.sequences)}
    return Oracle(wrong, VOCAB - 1, answers)


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("wrong", WRONG)
def test_drafts_change_no_answer(exact: GpuBench, name: str, wrong: float) -> None:
    samplings = [replace(SAMPLINGS[name], seed=n) for n in range(len(PROMPTS))]
    expected = exact.run(PROMPTS, samplings)
    found = exact.run(PROMPTS, samplings, oracle(expected, wrong))
    assert found.outcome == expected.outcome
    assert found.drafted > 0
    if wrong == 1.0:
        assert found.accepted == 0
    if wrong == 0.0:
        assert len(found.steps.steps) < len(expected.steps.steps)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("wrong", WRONG)
def test_with_prompts_in_a_small_pool(bench: GpuBench, wrong: float, depth: int) -> None:
    """Chunks, preemptions, prompts that share blocks, the context's end; one draws on the host."""
    prompts = [*PROMPTS, PROMPTS[2] + [7, 8], some_tokens(60, 9)]
    samplings = [replace(SEEDED, seed=n, max_tokens=30 + n) for n in range(len(prompts))]
    samplings[3] = replace(samplings[3], frequency_penalty=0.5)
    expected = bench.run(prompts, samplings, context_length=80)
    found = bench.run(
        prompts,
        samplings,
        oracle(expected, wrong),
        depth=depth,
        blocks=9,
        chunk_tokens=17,
        context_length=80,
    )
    assert found.outcome == expected.outcome
    assert found.drafted > 0
    assert bool(found.accepted) == (wrong < 1.0)
    assert any(_has_chunk_and_draft(step.rows) for step in found.steps.steps)


def _has_chunk_and_draft(rows: Sequence[PlanRow]) -> bool:
    ids = [row.sequence_id for row in rows]
    return any(row.count > 1 for row in rows) and len(set(ids)) < len(ids)


class Sometimes(Oracle):
    """Knows the answers, and says nothing most of the time."""

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        draft = super().propose(sequence_id, token_ids, most)
        return draft if len(token_ids) % 11 < 2 else None


@pytest.mark.parametrize("name", ["greedy", "seeded", "grammar", "penalties"])
def test_steps_with_drafts_among_steps_that_overlap(bench: GpuBench, name: str) -> None:
    samplings = [replace(SAMPLINGS[name], seed=n) for n in range(2)]
    expected = bench.run(PROMPTS[:2], samplings)
    answers = {n: sequence.token_ids for n, sequence in enumerate(expected.sequences)}
    found = bench.run(PROMPTS[:2], samplings, Sometimes(0.2, VOCAB - 1, answers))
    assert found.outcome == expected.outcome
    assert found.drafted > 0
    if name in ("greedy", "seeded"):
        assert 5 < found.steps.named < len(found.steps.steps) - 2


def test_without_drafts_every_step_overlaps(plain: GpuBench) -> None:
    """One that never proposes costs no wait."""
    samplings = [GREEDY] * len(PROMPTS)
    expected = plain.run(PROMPTS, samplings)
    found = plain.run(PROMPTS, samplings, Said([]))
    assert found.steps.named == expected.steps.named >= GREEDY.max_tokens - 2
    assert (found.drafted, found.outcome) == (0, expected.outcome)


def test_a_gpu_that_waits_for_the_host_is_looked_for_drafts_seldom(plain: GpuBench) -> None:
    """Lookups take time then, and drafting continues with it."""
    expected = plain.run(PROMPTS[:1], [GREEDY], slow=False)
    drafter = Said([])
    assert plain.run(PROMPTS[:1], [GREEDY], drafter, slow=False).outcome == expected.outcome
    assert 1 <= len(drafter.asked) <= 4
    knowing = plain.run(PROMPTS[:1], [GREEDY], oracle(expected, 0.3), slow=False)
    assert knowing.outcome == expected.outcome
    assert knowing.accepted > 5


def test_prompt_lookup_by_measured_costs(plain: GpuBench) -> None:
    """Costs are unknown: the runner measures them. Its answers are the same."""
    samplings = [replace(GREEDY, max_tokens=60)] * len(PROMPTS)
    expected = plain.run(PROMPTS, samplings)
    steps = TorchSteps(plain.built.runner.model, 200)
    speculation = make_overlap_speculation("ngram")
    built = plain.built
    runner = GpuRunner(steps, built.cache, built.runner.device, 0, speculation)  # type: ignore[arg-type]
    assert runner.drafter == "ngram"
    found = plain.run_on(runner, steps, PROMPTS, samplings, draft_tokens=MAX_DRAFT_TOKENS)
    assert found.outcome == expected.outcome


def test_a_drafted_token_is_a_row_of_its_own() -> None:
    plain_row = PlanRow(1, 7, 1, (4, 5), True)
    chunk = PlanRow(2, 0, 9, (6,), False)
    drafted = PlanRow(3, 15, 3, (8, 9), True, limit=20, draft=(11, 12))
    rows = verification_rows([plain_row, drafted, chunk])
    assert rows[0] == plain_row
    assert [(row.sequence_id, row.start, row.count) for row in rows[1:4]] == [
        (3, 15, 1),
        (3, 16, 1),
        (3, 17, 1),
    ]
    assert {row.block_table for row in rows[1:4]} == {(8, 9)}
    assert rows[4] == chunk


def test_drafters_by_name() -> None:
    assert make_overlap_speculation("none") is None
    with pytest.raises(ValueError, match="'guess' needs a model"):
        make_overlap_speculation("guess")


class Said:
    """Proposes the given tokens, whatever the sequence is; records the positions."""

    name = "said"

    def __init__(self, draft: list[int]) -> None:
        self.draft = draft
        self.asked: list[list[int]] = []

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        self.asked.append(list(token_ids))
        return Draft(self.draft[:most], 2) if self.draft else None

    def forget(self, sequence_id: int) -> None:
        pass


class Verified(WholeDrafts):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[int, int, int, int]] = []

    def verified(self, sequence_id: int, evidence: int, drafted: int, kept: int) -> None:
        self.seen.append((sequence_id, evidence, drafted, kept))


ROW = [PlanRow(0, 3, 1, (1,), True, limit=9)]


def test_what_follows_a_token_that_is_being_drawn_is_guessed() -> None:
    """The first token of the draft stands for that one: those behind it are what may be gained."""
    drafter, length = Said([5, 6]), Verified()
    speculation = OverlapSpeculation(drafter, length, AnyCosts())
    tokens = [1, 2, 3, -1]
    assert speculation.promises(ROW, {0: known_as(tokens)})
    assert tokens == [1, 2, 3, -1]
    assert drafter.asked == [[1, 2, 3]]
    drafter.draft = [5]
    assert not speculation.promises(ROW, {0: known_as(tokens)}), "nothing lies behind the guess"


@pytest.mark.parametrize(("drawn", "kept"), [(5, 1), (4, 0)])
def test_a_guess_is_compared_with_what_was_drawn(drawn: int, kept: int) -> None:
    length = Verified()
    speculation = OverlapSpeculation(Said([5, 6]), length, AnyCosts())
    speculation.promises(ROW, {0: known_as([1, 2, 3, -1])})
    assert length.seen == []
    row = [PlanRow(0, 4, 1, (1,), True, limit=9)]
    speculation.promises(row, {0: known_as([1, 2, 3, drawn, -1])})
    assert length.seen == [(0, 2, 1, kept)]
    speculation.forget(0)
    speculation.promises(row, {0: known_as([1, 2, 3, drawn, 7, -1])})
    assert len(length.seen) == 1, "its guess was forgotten"


def test_no_draft_goes_further_than_the_answer() -> None:
    """Of a limit of six tokens, with the one that is being drawn the fourth."""
    drafter = Said([5, 6, 7, 8])
    speculation = OverlapSpeculation(drafter, WholeDrafts(), AnyCosts())
    row = [PlanRow(0, 3, 1, (1,), True, limit=6)]
    assert speculation.promises(row, {0: known_as([1, 2, 3, -1])})
    (drafted,) = speculation.extend_overlapping(row, {0: known_as([1, 2, 3, 9])})
    assert drafted.draft == (5,)
    row = [PlanRow(0, 3, 1, (1,), True, limit=5)]
    assert not speculation.promises(row, {0: known_as([1, 2, 3, -1])})


@pytest.mark.parametrize("name", ["greedy", "penalties", "grammar"])
def test_with_an_engine_thread_and_one_that_waits(plain: GpuBench, name: str) -> None:
    """As in a worker: the caller that waits for a step's end does not begin the next."""
    samplings = [replace(SAMPLINGS[name], seed=n) for n in range(2)]
    expected = plain.run(PROMPTS[:2], samplings)
    answers = {n: sequence.token_ids for n, sequence in enumerate(expected.sequences)}
    built = plain.built
    speculation = OverlapSpeculation(Sometimes(0.3, VOCAB - 1, answers), WholeDrafts(), AnyCosts())
    steps = TorchSteps(built.runner.model, 200)
    runner = GpuRunner(
        steps,  # type: ignore[arg-type]
        built.cache,
        built.runner.device,
        built.config.vocab_size,
        speculation,
    )
    done: queue.SimpleQueue[tuple[StepPlan, StepResult | Exception]] = queue.SimpleQueue()
    thread = EngineThread(runner, lambda plan, result: done.put((plan, result)), fail=pytest.fail)
    limits = replace(built.scheduler.limits, draft_tokens=MAX_DRAFT_TOKENS)
    engine = replace(built, runner=runner, scheduler=Scheduler(BlockPool(64), limits))
    sequences = _add(engine, PROMPTS[:2], samplings)
    thread.start()
    try:
        accepted = 0
        while not engine.scheduler.is_idle():
            while engine.scheduler.plans_in_flight < 2 and (plan := engine.scheduler.schedule()):
                thread.submit(plan)
            plan, result = done.get(timeout=30)
            assert isinstance(result, StepResult), result
            engine.scheduler.complete(plan, result)
            accepted += result.accepted
    finally:
        thread.stop(30)
    assert [(each.token_ids, each.finish_reason) for each in sequences] == expected.outcome
    assert accepted > 0


class Told(OverlapSpeculation):
    """Records of each step how many tokens it drafted, and whether it overlapped."""

    def __init__(self, drafter: Drafter) -> None:
        super().__init__(drafter, WholeDrafts(), AnyCosts())
        self.steps: list[tuple[int, bool]] = []

    def observe(self, batch: int, drafted: int, seconds: float) -> None:
        assert seconds > 0
        self.steps.append((drafted, False))

    def observe_overlapping(self, batch: int, seconds: float) -> None:
        assert seconds > 0
        self.steps.append((0, True))


class Twice(Oracle):
    """Proposes where two drafts follow one another, and then not for some tokens."""

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        behind = len(token_ids) - len(PROMPTS[0])
        # Asked behind the token before the one that is drawn, then with that one known.
        told = {8: 3, 9: 1, 11: 1}.get(behind, 0)
        right = self.answers[sequence_id][len(token_ids) : len(token_ids) + told]
        return Draft(right, 1) if told else None


def test_steps_are_reported_by_whether_they_overlapped(plain: GpuBench) -> None:
    """What waits for drafts is never taken for a step as it is without."""
    expected = plain.run(PROMPTS[:1], [GREEDY])
    built = plain.built
    told = Told(Twice(0.0, VOCAB, {0: expected.sequences[0].token_ids}))
    steps = TorchSteps(built.runner.model, 200)
    runner = GpuRunner(steps, built.cache, built.runner.device, 0, told)  # type: ignore[arg-type]
    found = plain.run_on(runner, steps, PROMPTS[:1], [GREEDY], draft_tokens=MAX_DRAFT_TOKENS)
    assert found.outcome == expected.outcome
    assert (found.drafted, found.accepted) == (2, 2)
    # Two drafts, and the step behind them, which waits for what they bring.
    first = told.steps.index((1, False))
    assert told.steps[first : first + 4] == [(1, False), (1, False), (0, False), (0, True)]
    others = told.steps[:first] + told.steps[first + 3 :]
    assert set(others) == {(0, True)}
