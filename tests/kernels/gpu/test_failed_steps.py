"""Steps that fail on the GPU's runner, as they begin or as they end, and what comes after them.

The step model is torch here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import Engine, EngineSettings
from engine.execution.runner import ModelRunner
from engine.gpu.decoder import Masks, StartedStep
from engine.gpu.draws import Draw
from engine.gpu.runner import GpuRunner
from engine.sampling.step import StepInput
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from tests.kernels.gpu.torch_steps import TorchSteps
from tests.support.models import make_tiny_model

GREEDY = SamplingParams(temperature=0.0)
PROMPTS = ((3, 1, 4, 1, 5), (2, 7, 1, 8), (1, 6, 1))
NO_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


class BrokenEnd:
    """The end of a step that is never known."""

    def query(self) -> bool:
        return False

    def synchronize(self) -> None:
        raise NO_MEMORY


class FailingSteps(TorchSteps):
    """Steps fail as the test says, by the order in which they are started."""

    begin_fails: tuple[int, ...] = ()
    """Once the step has drawn: the worst moment."""
    end_fails: tuple[int, ...] = ()

    def start(
        self, step: StepInput, draws: Sequence[Draw], masks: Masks | None = None
    ) -> StartedStep:
        started = super().start(step, draws, masks)
        if len(self.steps) in self.begin_fails:
            raise NO_MEMORY
        if len(self.steps) in self.end_fails:
            broken: Any = BrokenEnd()
            return replace(started, _ended=broken)
        return started


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    torch.set_num_threads(1)
    folder: Path = make_tiny_model(tmp_path_factory.mktemp("tiny"))
    return build_engine(
        EngineSettings(folder, dtype="float32", device="cpu", threads=1, kv_pool_bytes=2 << 20)
    )


def runner_of(built: Engine, steps: TorchSteps) -> GpuRunner:
    return GpuRunner(steps, built.cache, built.runner.device)  # type: ignore[arg-type]


def new(number: int) -> NewSequence:
    return NewSequence(number, PROMPTS[number], len(PROMPTS[number]), GREEDY, ())


def prompt(number: int) -> PlanRow:
    return PlanRow(number, 0, len(PROMPTS[number]), (1 + number,), True)


def decode(number: int, place: int) -> PlanRow:
    """The row of a sequence's output token ``place``, from 0."""
    return PlanRow(number, len(PROMPTS[number]) + place, 1, (1 + number,), True)


def answers(built: Engine, number: int, count: int) -> list[tuple[tuple[int, ...], ...]]:
    """A sequence's tokens alone, each as a step's."""
    plain = ModelRunner(built.runner.model, built.cache, built.runner.device)
    found = [plain.run(StepPlan(1, (new(number),), (), (prompt(number),))).token_ids]
    for place in range(count - 1):
        plan = StepPlan(2 + place, (), (), (decode(number, place),))
        found.append(plain.run(plan).token_ids)
    return found


def has_names(runner: GpuRunner) -> bool:
    return any(token < 0 for known in runner._known.values() for token in known.token_ids)


def test_one_that_cannot_begin_leaves_no_tokens_behind(built: Engine) -> None:
    """It has drawn where the step before has, whose tokens are still known by their places."""
    expected = answers(built, 0, 3)
    other = answers(built, 1, 2)
    assert expected[0] != other[1], "a wrong token would not be seen"
    steps = FailingSteps(built.runner.model, 8)
    steps.begin_fails = (2,)
    runner = runner_of(built, steps)
    first = runner.start(StepPlan(1, (new(0), new(1)), (), (prompt(0), prompt(1))))
    with pytest.raises(torch.OutOfMemoryError):
        runner.start(StepPlan(2, (), (), (decode(1, 0),)))
    second = runner.start(StepPlan(3, (), (1,), (decode(0, 0),)))
    third = runner.start(StepPlan(4, (), (), (decode(0, 1),)))
    assert first().token_ids == (expected[0][0], other[0][0])
    assert [second().token_ids, third().token_ids] == expected[1:]
    assert steps.named == 2, "steps overlap again after the next one"


def test_one_whose_end_fails_leaves_no_names(built: Engine) -> None:
    """Its sequences, and those of the step behind it, do not go on; others are computed as ever."""
    steps = FailingSteps(built.runner.model, 8)
    steps.end_fails = (1,)
    runner = runner_of(built, steps)
    first = runner.start(StepPlan(1, (new(0),), (), (prompt(0),)))
    second = runner.start(StepPlan(2, (new(1),), (), (decode(0, 0), prompt(1))))
    with pytest.raises(torch.OutOfMemoryError):
        first()
    assert second().token_ids[1] == answers(built, 1, 1)[0][0]
    # The failure is known: it does not keep this one from beginning, without what lacks tokens.
    third = runner.start(StepPlan(3, (new(2),), (0,), (decode(1, 0), prompt(2))))()
    assert third.left_out == (0,)
    assert third.token_ids == ((), answers(built, 2, 1)[0][0])
    assert not has_names(runner) or not runner._known[1].token_ids[-1] < 0
    assert sorted(runner._known) == [1, 2]
    fourth = runner.start(StepPlan(4, (), (), (decode(1, 1),)))()
    assert (fourth.token_ids, fourth.left_out) == (((),), (0,))
    ending = runner.start(StepPlan(5, (new(0),), (1, 2), (prompt(0),)))
    following = runner.start(StepPlan(6, (), (), (decode(0, 0),)))
    assert [ending().token_ids, following().token_ids] == answers(built, 0, 2)
    assert sorted(runner._known) == [0]
