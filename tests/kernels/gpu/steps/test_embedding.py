"""Embeddings on the GPU's runner: those of the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from baton.sampling_params import SamplingParams
from engine.execution.runner import ModelRunner
from engine.gpu.runner import GpuRunner
from engine.model.embedding import Embedder
from engine.sampling.step import StepInput
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan, StepResult
from tests.kernels.gpu.device import DEVICE
from tests.kernels.gpu.steps.pairs import Recorder, gpu, load, reference, save, some_tokens

PROMPT = tuple(some_tokens(12, 120))
BESIDE = tuple(some_tokens(4, 120, 1))
ONE = tuple(some_tokens(1, 120, 2))
GREEDY = SamplingParams(temperature=0.0, max_tokens=1)


@pytest.fixture(scope="module", params=["llama", pytest.param("gemma2", marks=pytest.mark.long)])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name = request.param
    layers = {"num_hidden_layers": 1} if name == "llama" else {}
    return save(tmp_path_factory.mktemp(name), name, **layers)


def run(runner: ModelRunner) -> list[StepResult]:
    """Two embedded sequences, one in two chunks and one of one token, with a plain one."""
    embedded = NewSequence(0, PROMPT, 12, GREEDY, (), embeds=True)
    plain = NewSequence(1, BESIDE, 4, GREEDY, ())
    short = NewSequence(2, ONE, 1, GREEDY, (), embeds=True)
    first = StepPlan(
        1,
        (embedded, plain),
        (),
        (PlanRow(0, 0, 7, (1,), False), PlanRow(1, 0, 4, (2,), True)),
    )
    rows = (
        PlanRow(0, 7, 5, (1,), True),
        PlanRow(1, 4, 1, (2,), True),
        PlanRow(2, 0, 1, (3,), True),
    )
    return [runner.run(first), runner.run(StepPlan(2, (short,), (), rows))]


def test_the_same_as_the_reference(folder: Path) -> None:
    plain = load(folder)
    steps = reference(plain)
    expected = run(ModelRunner(steps.model, steps.cache, DEVICE, embedder=Embedder(plain)))
    model = load(folder)
    embedder = Embedder(model)
    steps = gpu(model, capture=Recorder())
    found = run(GpuRunner(steps.model, steps.cache, DEVICE, embedder=embedder))
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert found[0].embeddings == expected[0].embeddings == ()
    assert [vector is None for vector in found[1].embeddings] == [False, True, False]
    for one, other in zip(found[1].embeddings, expected[1].embeddings, strict=True):
        if one is not None:
            assert other is not None
            torch.testing.assert_close(torch.tensor(one), torch.tensor(other), atol=1e-3, rtol=0)


def test_other_states_are_refused(folder: Path) -> None:
    steps = gpu(load(folder))
    row = PlanRow(0, 0, 4, (2,), True)
    with pytest.raises(ValueError, match="only the hidden states"):
        steps.model.run(StepInput((row,), list(BESIDE), [3], True, (0,)))
