"""Drafts in real steps of a tiny model: right, wrong or mixed, they change no answer."""

from __future__ import annotations

import shutil
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from baton.request import FinishReason, SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings, drafter_of, make_sequence
from engine.execution.runner import ModelRunner
from engine.offline import compile_grammar
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import StepPlan, StepResult
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence as EngineSequence
from engine.speculation.speculation import (
    MAX_DRAFT_TOKENS,
    Drafter,
    NgramDrafter,
    Speculation,
    kept_tokens,
    make_speculation,
)
from tests.support.engine.drafters import Oracle, WholeDrafts
from tests.support.engine.speculation import GREEDY, PROMPTS, SAMPLINGS, SEEDED, some_tokens
from tests.support.models import VOCAB, make_tiny_model

WRONG = (0.0, 1.0, 0.3)


@dataclass
class Answer:
    """Of one run."""

    engine: Engine
    sequences: list[EngineSequence]
    drafted: int = 0
    accepted: int = 0
    steps: int = 0

    @property
    def tokens(self) -> list[list[int]]:
        return [sequence.token_ids for sequence in self.sequences]

    @property
    def reasons(self) -> list[FinishReason | None]:
        return [sequence.finish_reason for sequence in self.sequences]


class Bench:
    """One model; each run has a scheduler and a pool of its own."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        self.built = build_engine(
            EngineSettings(folder, device="cpu", threads=1, kv_pool_bytes=2 << 20, **settings)
        )

    def engine(self, drafter: Drafter | None, blocks: int, **limits: Any) -> Engine:
        runner = self.built.runner
        speculation = Speculation(drafter, WholeDrafts()) if drafter is not None else None
        fresh = ModelRunner(
            runner.model, runner.cache, runner.device, self.built.config.vocab_size, speculation
        )
        changed = replace(
            self.built.scheduler.limits,
            draft_tokens=MAX_DRAFT_TOKENS if drafter is not None else 0,
            **limits,
        )
        pool = BlockPool(blocks)
        return replace(self.built, runner=fresh, pool=pool, scheduler=Scheduler(pool, changed))

    def run(
        self,
        prompts: Sequence[list[int]],
        samplings: Sequence[SamplingParams],
        drafter: Drafter | None = None,
        *,
        depth: int = 1,
        blocks: int = 64,
        **limits: Any,
    ) -> Answer:
        """All prompts together, up to ``depth`` plans in flight."""
        engine = self.engine(drafter, blocks, **limits)
        sequences = []
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            spec = SequenceSpec(f"{number}", 0, "", tuple(prompt), len(prompt), sampling)
            sequences.append(make_sequence(engine, number, spec))
            compile_grammar(engine, sequences[-1])
            engine.scheduler.add(sequences[-1])
        answer = Answer(engine, sequences)
        flight: deque[tuple[StepPlan, StepResult]] = deque()
        while True:
            while len(flight) < depth and (plan := engine.scheduler.schedule()) is not None:
                flight.append((plan, engine.runner.run(plan)))
            if not flight:
                break
            plan, result = flight.popleft()
            engine.scheduler.complete(plan, result)
            answer.drafted += result.drafted
            answer.accepted += result.accepted
            answer.steps += 1
        assert engine.scheduler.is_idle()
        engine.pool.check()
        assert engine.pool.counts().used == 0
        return answer


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """In fp32, by torch."""
    return Bench(make_tiny_model(tmp_path_factory.mktemp("plain")), dtype="float32")


@pytest.fixture(scope="module")
def fast(tmp_path_factory: pytest.TempPathFactory) -> Bench:
    """In bf16, by the CPU's own decoder: the same bits in every batch."""
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    folder = make_tiny_model(tmp_path_factory.mktemp("fast"), head_dim=16)
    return Bench(folder, deterministic=True)


@pytest.fixture(params=["plain", "fast"])
def bench(request: pytest.FixtureRequest) -> Bench:
    found: Bench = request.getfixturevalue(request.param)
    return found


def oracle(answer: Answer, wrong: float) -> Oracle:
    return Oracle(wrong, VOCAB - 1, dict(enumerate(answer.tokens)))


def check_same(found: Answer, expected: Answer) -> None:
    assert found.tokens == expected.tokens
    assert found.reasons == expected.reasons


@pytest.mark.parametrize("name", SAMPLINGS)
@pytest.mark.parametrize("wrong", WRONG)
def test_drafts_change_no_answer(bench: Bench, name: str, wrong: float) -> None:
    samplings = [replace(SAMPLINGS[name], seed=n) for n in range(len(PROMPTS))]
    expected = bench.run(PROMPTS, samplings)
    found = bench.run(PROMPTS, samplings, oracle(expected, wrong))
    check_same(found, expected)
    assert found.drafted > 0
    if wrong == 1.0:
        assert found.accepted == 0
        assert found.steps == expected.steps
    if wrong == 0.0:
        assert found.steps < expected.steps


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("wrong", WRONG)
def test_in_a_small_pool_with_two_plans_in_flight(bench: Bench, wrong: float, depth: int) -> None:
    """Chunks, preemptions, prompts that share blocks, and the context's end."""
    prompts = [*PROMPTS, PROMPTS[2] + [7, 8], some_tokens(60, 9)]
    samplings = [replace(SEEDED, seed=n, max_tokens=30 + n) for n in range(len(prompts))]
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
    check_same(found, expected)
    assert found.drafted > 0
    assert bool(found.accepted) == (wrong < 1.0)


def test_a_step_goes_no_further_than_the_answer(bench: Bench) -> None:
    """All drafts are right, and no token is drawn for nothing."""
    samplings = [replace(GREEDY, max_tokens=count) for count in (1, 2, 3, 15)]
    expected = bench.run(PROMPTS, samplings)
    found = bench.run(PROMPTS, samplings, oracle(expected, 0.0), depth=2)
    check_same(found, expected)
    assert found.accepted < sum(sampling.max_tokens for sampling in samplings)


@pytest.mark.parametrize("wrong", WRONG)
def test_what_the_cache_finds_is_right_to_the_last_bit(fast: Bench, wrong: float) -> None:
    """The KV of tokens that were wrong is in no block that can be found."""

    def cached(answer: Answer) -> list[torch.Tensor]:
        pool, cache = answer.engine.pool, answer.engine.cache
        tables = [pool.match(sequence.full_hashes(16)) for sequence in answer.sequences]
        return [cache.block(block).clone() for table in tables for block in table]

    samplings = [replace(SEEDED, seed=n) for n in range(len(PROMPTS))]
    expected = fast.run(PROMPTS, samplings)
    blocks = cached(expected)
    found = fast.run(PROMPTS, samplings, oracle(expected, wrong), depth=2)
    assert len(blocks) == sum((len(tokens) - 1) // 16 for tokens in expected.tokens)
    for one, other in zip(cached(found), blocks, strict=True):
        assert torch.equal(one, other)


def test_prompt_lookup_finds_what_repeats(bench: Bench) -> None:
    """A model that is biased to two tokens repeats itself."""
    bias = ((3, 30.0), (4, 30.0))
    samplings = [replace(GREEDY, logit_bias=bias) for _ in PROMPTS]
    expected = bench.run(PROMPTS, samplings)
    found = bench.run(PROMPTS, samplings, NgramDrafter())
    check_same(found, expected)
    assert found.accepted > len(PROMPTS) * 20
    assert found.steps < expected.steps / 2


def test_a_prefill_drafts_nothing(bench: Bench) -> None:
    engine = bench.engine(Oracle(0.0, VOCAB, {}), 64)
    spec = SequenceSpec("0", 0, "", tuple(PROMPTS[2]), 40, GREEDY)
    engine.scheduler.add(make_sequence(engine, 0, spec, prefill_only=True))
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert engine.runner.run(plan).drafted == 0


def test_what_is_known_of_a_sequence_goes_with_it(bench: Bench) -> None:
    expected = bench.run(PROMPTS, [GREEDY] * len(PROMPTS))
    drafter = oracle(expected, 0.5)
    engine = bench.engine(drafter, 64)
    spec = SequenceSpec("0", 0, "", tuple(PROMPTS[0]), len(PROMPTS[0]), GREEDY)
    engine.scheduler.add(make_sequence(engine, 0, spec))
    while (plan := engine.scheduler.schedule()) is not None:
        engine.scheduler.complete(plan, engine.runner.run(plan))
    engine.runner.forget(0)
    assert drafter.forgotten == [0]


@pytest.mark.parametrize(
    ("draft", "drawn", "kept"),
    [([], [4], 0), ([4], [4, 5], 1), ([4, 5], [4, 6, 7], 1), ([3, 5], [4, 5, 6], 0)],
)
def test_a_draft_is_kept_up_to_its_first_wrong_token(
    draft: list[int], drawn: list[int], kept: int
) -> None:
    assert kept_tokens(draft, drawn) == kept


def test_drafters_by_name(tmp_path: Path) -> None:
    assert make_speculation("none") is None
    made = make_speculation("ngram")
    assert made is not None
    assert made.drafter == "ngram"
    folder = make_tiny_model(tmp_path)
    settings = EngineSettings(folder, dtype="float32", device="cpu", kv_pool_bytes=1 << 20)
    assert build_engine(replace(settings, drafter="ngram")).runner.drafter == "ngram"
    assert build_engine(replace(settings, drafter="auto")).runner.drafter == "ngram"
    assert build_engine(settings).runner.drafter == "none"
    with pytest.raises(ConfigError, match="'guess' is unknown; known: auto, none, ngram"):
        build_engine(replace(settings, drafter="guess"))


def test_a_gpu_drafts_if_configured() -> None:
    gpu = torch.device("cuda")
    found = {
        name: drafter_of(EngineSettings(Path(), drafter=name), gpu)
        for name in ("auto", "none", "ngram")
    }
    assert found == {"auto": "none", "none": "none", "ngram": "ngram"}
    with pytest.raises(ConfigError, match="draft runs only on CPUs"):
        drafter_of(EngineSettings(Path(), drafter="draft"), gpu)
