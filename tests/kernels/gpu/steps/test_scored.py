"""Log probabilities, prompts that are scored, and choices that fork, on the GPU's runner."""

from __future__ import annotations

from pathlib import Path

import pytest

from baton.logprobs import TokenLogprobs
from baton.sampling_params import SamplingParams
from engine.execution.runner import ModelRunner
from engine.gpu.runner import GpuRunner
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan, StepResult
from tests.kernels.gpu.device import DEVICE
from tests.kernels.gpu.steps.pairs import Recorder, gpu, load, reference, save, some_tokens

PROMPT = tuple(some_tokens(12, 120))
WARM = SamplingParams(temperature=1.0, seed=5, logprobs=3, prompt_logprobs=2)
PLAIN = SamplingParams(temperature=0.0)
BESIDE = tuple(some_tokens(4, 120, 1))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


def run(runner: ModelRunner, choices: int) -> list[StepResult]:
    """A prompt in two scored chunks with a plain sequence, its forks, and a step of them all."""
    scored = NewSequence(0, PROMPT, 12, WARM, ())
    beside = NewSequence(1, BESIDE, 4, PLAIN, ())
    first = StepPlan(
        1,
        (scored, beside),
        (),
        (PlanRow(0, 0, 7, (1,), False, scored=7), PlanRow(1, 0, 4, (2,), True)),
    )
    last = PlanRow(0, 7, 5, (1,), True, choices=choices, scored=4)
    second = StepPlan(2, (), (), (PlanRow(1, 4, 1, (2,), True), last))
    found = [runner.run(first), runner.run(second)]
    tokens = found[1].token_ids[1]
    forks = tuple(NewSequence(10 + n, (*PROMPT, tokens[n]), 12, WARM, (), choice=n) for n in (1, 2))
    rows = (
        PlanRow(0, 12, 1, (1,), True),
        PlanRow(11, 12, 1, (4,), True),
        PlanRow(1, 5, 1, (2,), True),
        PlanRow(12, 12, 1, (5,), True),
    )
    third = StepPlan(3, forks, (), rows, ((1, 4), (1, 5)))
    return [*found, runner.run(third)]


def near(one: TokenLogprobs, other: TokenLogprobs) -> None:
    assert one.logprob == pytest.approx(other.logprob, abs=1e-3)
    assert [token for token, _ in one.top] == [token for token, _ in other.top]


@pytest.mark.parametrize("choices", [3, 5])
def test_the_same_as_the_reference(folder: Path, choices: int) -> None:
    """With 5 choices, a step has as many draws as rows of logits, and they differ all the same."""
    plain_steps = reference(load(folder))
    expected = run(ModelRunner(plain_steps.model, plain_steps.cache, DEVICE), choices)
    steps = gpu(load(folder), capture=Recorder())
    found = run(GpuRunner(steps.model, steps.cache, DEVICE), choices)
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert len(found[1].token_ids[1]) == choices
    assert [len(scores) for scores in found[0].prompt_logprobs] == [7, 0]
    assert [len(scores) for scores in found[1].prompt_logprobs] == [0, 4]
    assert [scores and len(scores) for scores in found[1].logprobs] == [None, choices]
    assert [scores and len(scores) for scores in found[2].logprobs] == [1, 1, None, 1]
    for one, other in zip(found, expected, strict=True):
        for scores, others in zip(
            one.logprobs + one.prompt_logprobs,
            other.logprobs + other.prompt_logprobs,
            strict=True,
        ):
            for score, right in zip(scores or (), others or (), strict=True):
                near(score, right)
