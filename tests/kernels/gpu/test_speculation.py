"""Drafts on the GPU's runner: steps overlap, wait or check drafts, and no answer changes.

The step model is torch here; ``steps/test_drafts.py`` has the kernels.
"""

from __future__ import annotations

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
from engine.block_pool import BlockPool
from engine.drafter import Drafter
from engine.engine import Engine, EngineSettings, build_engine
from engine.gpu.overlap_costs import OverlapCosts
from engine.gpu.runner import GpuRunner
from engine.gpu.speculation import (
    OverlapSpeculation,
    make_overlap_speculation,
    verification_rows,
)
from engine.local import make_sequence
from engine.ngram_drafter import NgramDrafter
from engine.plan import PlanRow, StepPlan
from engine.runner import Ending
from engine.scheduler import Scheduler
from engine.sequence import Sequence as EngineSequence
from engine.speculation import MOST_DRAFT_TOKENS, DraftedRow
from tests.kernels.gpu.torch_steps import TorchSteps
from tests.models import VOCAB, make_tiny_model
from tests.unit.engine.drafters import Oracle, WholeDrafts
from tests.unit.engine.test_speculation import GREEDY, PROMPTS, SAMPLINGS, SEEDED, some_tokens

WRONG = (0.0, 1.0, 0.3)


class AnyCosts(OverlapCosts):
    """All drafts are worth the wait, beside prompts too."""

    def __init__(self) -> None:
        pass

    def observe(self, batch: int, seconds: float) -> None:
        assert seconds > 0

    def seconds(self, batch: int, rows: int, most: int, *, first: bool) -> list[float]:
        return [1.0] * (most + 1)


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
        **limits: Any,
    ) -> Answer:
        """All prompts together, up to ``depth`` steps begun before the first is waited for."""
        built = self.built
        steps = TorchSteps(built.runner.model, 200)
        speculation = OverlapSpeculation(drafter, WholeDrafts(), AnyCosts()) if drafter else None
        runner = GpuRunner(
            steps,  # type: ignore[arg-type]
            built.cache,
            built.runner.device,
            built.grammars,
            speculation,
        )
        draft_tokens = MOST_DRAFT_TOKENS if drafter else 0
        changed = replace(built.scheduler.limits, draft_tokens=draft_tokens, **limits)
        pool = BlockPool(blocks)
        engine = replace(built, runner=runner, pool=pool, scheduler=Scheduler(pool, changed))
        sequences = []
        for number, (prompt, sampling) in enumerate(zip(prompts, samplings, strict=True)):
            spec = SequenceSpec(f"{number}", 0, "", tuple(prompt), len(prompt), sampling)
            sequences.append(make_sequence(engine, number, spec))
            engine.scheduler.add(sequences[-1])
        answer = Answer(engine, sequences, steps)
        for plan, ending in _in_flight(engine, depth):
            result = ending()
            assert result.seconds >= 0
            engine.scheduler.complete(plan, result)
            answer.drafted += result.drafted
            answer.accepted += result.accepted
        assert engine.scheduler.is_idle()
        engine.pool.check()
        return answer


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
    """In bf16, by the CPU's own decoder: the same bits in every batch, as a GPU's where it is told

    so.
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
def test_drafts_change_no_answer(bench: GpuBench, name: str, wrong: float) -> None:
    samplings = [replace(SAMPLINGS[name], seed=n) for n in range(len(PROMPTS))]
    expected = bench.run(PROMPTS, samplings)
    found = bench.run(PROMPTS, samplings, oracle(expected, wrong))
    assert found.outcome == expected.outcome
    assert found.drafted > 0
    if wrong == 1.0:
        assert found.accepted == 0
    if wrong == 0.0:
        assert len(found.steps.steps) < len(expected.steps.steps)
