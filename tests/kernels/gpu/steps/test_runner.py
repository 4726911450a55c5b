"""Overlapping steps: each is started before the one before has been waited for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.grammar import Grammar, GrammarKind
from baton.sampling_params import SamplingParams
from engine.execution.runner import Ending, ModelRunner
from engine.gpu.runner import GpuRunner
from engine.scheduling.plan import NewSequence, PlanRow, StepPlan
from tests.kernels.gpu.device import DEVICE
from tests.kernels.gpu.steps.pairs import Recorder, gpu, load, reference, save, some_tokens
from tests.support.fake_grammars import FakeMatcher

GREEDY = SamplingParams(temperature=0.0)
TABLES = ((1, 2), (4, 3), (6,), (7,))
PROMPTS = (12, 5, 3, 1)
VOCAB = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


def new(number: int, **changes: Any) -> NewSequence:
    tokens = tuple(some_tokens(PROMPTS[number], 120, number))
    matcher = FakeMatcher(VOCAB) if "grammar" in changes else None
    sampling = replace(GREEDY, **changes)
    return NewSequence(number, tokens, len(tokens), sampling, (2,), matcher=matcher)


def row(number: int, start: int, count: int = 1, sample: bool = True) -> PlanRow:
    return PlanRow(number, start, count, TABLES[number], sample)


def plans(sampling: tuple[dict[str, Any], ...]) -> list[StepPlan]:
    """Prompts that join sequences that decode; one leaves and comes back with what it has said."""
    joined = [new(number, **changes) for number, changes in enumerate(sampling)]
    return [
        StepPlan(1, (joined[0],), (), (row(0, 0, 12),)),
        StepPlan(2, (joined[1],), (), (row(0, 12), row(1, 0, 4, sample=False))),
        StepPlan(3, (joined[2],), (), (row(0, 13), row(1, 4), row(2, 0, 3))),
        StepPlan(4, (), (), (row(2, 3), row(0, 14), row(1, 5))),
        StepPlan(5, (joined[3],), (1,), (row(3, 0), row(0, 15), row(2, 4))),
        StepPlan(6, (), (), (row(0, 16), row(2, 5), row(3, 1))),
        StepPlan(7, (), (), (row(2, 6),)),
        StepPlan(8, (), (), (row(0, 17), row(3, 2), row(2, 7))),
    ]


def overlapped(runner: ModelRunner, all_plans: list[StepPlan]) -> list[Any]:
    """As the engine core does it: the next step is started, then the last one is waited for."""
    endings: list[Ending] = []
    found = []
    for plan in all_plans:
        endings.append(runner.start(plan))
        if len(endings) == 2:
            found.append(endings.pop(0)())
    return found + [ending() for ending in endings]


WARM = {"temperature": 1.0, "seed": 5}
LIMITED = {"temperature": 1.5, "seed": 6, "top_p": 0.7, "top_k": 20}
NEAR = {"temperature": 1.2, "seed": 7, "min_p": 0.05}
PENALISED = {"repetition_penalty": 1.8, "frequency_penalty": 1.0}
SHORT = {"temperature": 0.7, "seed": 8, "min_tokens": 3}
GRAMMAR = Grammar(GrammarKind.REGEX, "any")
STRICT = {"grammar": GRAMMAR}
STRICT_LIMITED = LIMITED | {"grammar": GRAMMAR, "min_tokens": 2}
STRICT_PENALISED = PENALISED | {"grammar": GRAMMAR}


@pytest.mark.parametrize(
    "sampling",
    [
        pytest.param(({}, {}, {}, {}), id="greedy", marks=pytest.mark.long),
        pytest.param((WARM, {}, LIMITED, NEAR), id="drawn on the device", marks=pytest.mark.long),
        pytest.param(({}, WARM, PENALISED, {}), id="one on the host", marks=pytest.mark.long),
        pytest.param((LIMITED, SHORT, WARM, PENALISED), id="all kinds"),
        pytest.param(
            (STRICT, {}, STRICT_LIMITED, WARM), id="with grammars", marks=pytest.mark.long
        ),
        pytest.param(
            (STRICT, STRICT_LIMITED, STRICT_PENALISED, {}),
            id="with grammars on the host",
            marks=pytest.mark.long,
        ),
    ],
)
def test_overlapping_steps_draw_what_single_ones_do(
    folder: Path, sampling: tuple[dict[str, Any], ...]
) -> None:
    expected_steps = reference(load(folder))
    plain = ModelRunner(expected_steps.model, expected_steps.cache, DEVICE, VOCAB)
    expected = [plain.run(plan).token_ids for plan in plans(sampling)]
    steps = gpu(load(folder), capture=Recorder())
    runner = GpuRunner(steps.model, steps.cache, DEVICE, VOCAB)
    found = overlapped(runner, plans(sampling))
    assert [result.step for result in found] == list(range(1, 9))
    assert [result.token_ids for result in found] == expected
    assert all(result.seconds >= 0 and not result.failed for result in found)
    torch.testing.assert_close(
        steps.cache.data[[1, 2, 6, 7]], expected_steps.cache.data[[1, 2, 6, 7]], atol=1e-4, rtol=0
    )


def test_a_sequence_whose_grammar_fails_is_named(folder: Path) -> None:
    """Its row, in each step that draws for it; the others' tokens are what they would be."""
    steps, expected_steps = gpu(load(folder)), reference(load(folder))
    runner = GpuRunner(steps.model, steps.cache, DEVICE, VOCAB)
    plain = ModelRunner(expected_steps.model, expected_steps.cache, DEVICE, VOCAB)
    broken = replace(new(0, **STRICT), prompt_length=PROMPTS[0] - 3)
    work = [
        StepPlan(1, (new(1), broken), (), (row(1, 0, 5), row(0, 0, 12))),
        StepPlan(2, (), (), (row(0, 12), row(1, 5))),
    ]
    found, expected = overlapped(runner, work), [plain.run(plan) for plan in work]
    assert [result.token_ids for result in found] == [result.token_ids for result in expected]
    assert [[place for place, _ in result.failed] for result in found] == [[1], [0]]
    assert "may not come" in found[0].failed[0][1]


def test_a_step_waited_for_at_once(folder: Path) -> None:
    steps = gpu(load(folder))
    runner = GpuRunner(steps.model, steps.cache, DEVICE)
    plain_steps = reference(load(folder))
    plain = ModelRunner(plain_steps.model, plain_steps.cache, DEVICE)
    for plan in plans(({}, WARM, {}, {}))[:3]:
        assert runner.run(plan).token_ids == plain.run(plan).token_ids
