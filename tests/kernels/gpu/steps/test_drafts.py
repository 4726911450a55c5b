"""Drafts with the GPU's kernels: their tokens are rows of captured decode steps."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
import torch

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.execution.runner import Ending
from engine.gpu.decoder import GpuStepModel
from engine.gpu.fused_weights import gpu_weights
from engine.gpu.runner import GpuRunner
from engine.gpu.speculation import OverlapSpeculation
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.plan import PlanRow, StepPlan
from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import SchedulerLimits, Sequence
from engine.speculation.speculation import MAX_DRAFT_TOKENS
from tests.kernels.gpu.device import DEVICE
from tests.kernels.gpu.steps.pairs import (
    BLOCK,
    BLOCKS,
    UNTOUCHED,
    Recorder,
    gpu,
    load,
    new_cache,
    reference,
    save,
    some_tokens,
)
from tests.support.engine.drafters import Oracle, WholeDrafts
from tests.support.kernels.speculation import AnyCosts

VOCAB = 120
LENGTH = 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_sequence_of_several_rows(folder: Path, deterministic: bool) -> None:
    """Each row sees those before it; they end one block and begin the next; a fourth is padding."""
    recorder = Recorder()
    steps = gpu(load(folder), capture=recorder, deterministic=deterministic)
    expected_steps = reference(load(folder))
    tokens = some_tokens(LENGTH, VOCAB)
    table = (3, 5)
    for each in (steps, expected_steps):
        each.logits([(tokens, PlanRow(0, 0, 14, table, True))])
    rows = [(tokens, PlanRow(0, 14 + place, 1, table, True)) for place in range(3)]
    found = torch.cat(steps.logits(rows))
    (expected,) = expected_steps.logits([(tokens, PlanRow(0, 14, 3, table, True))])
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
    assert (recorder.captured, recorder.replayed) == (1, 1)
    written = (steps.cache.data != UNTOUCHED).any(dim=-1).any(dim=1).any(dim=1).any(dim=1)
    slots = {(int(block), int(slot)) for block, slot in written.nonzero().tolist()}
    assert slots == {(table[place // BLOCK], place % BLOCK) for place in range(17)}


SAMPLINGS = (
    SamplingParams(temperature=0.0, max_tokens=7, ignore_eos=True),
    SamplingParams(temperature=1.0, seed=3, top_k=40, max_tokens=8, ignore_eos=True),
)


def answers(folder: Path, oracle: Oracle | None, recorder: Recorder) -> list[list[int]]:
    """Two sequences; one begins while the other decodes."""
    model = load(folder)
    cache = new_cache(model)
    limits = SchedulerLimits(BLOCK, 16, 8, 128, draft_tokens=MAX_DRAFT_TOKENS if oracle else 0)
    scheduler = Scheduler(BlockPool(BLOCKS), limits)
    speculation = OverlapSpeculation(oracle, WholeDrafts(), AnyCosts()) if oracle else None
    steps = GpuStepModel(gpu_weights(model), cache, 32, capture=recorder)
    runner = GpuRunner(steps, cache, DEVICE, 0, speculation)
    sequences = []
    for number, sampling in enumerate(SAMPLINGS):
        prompt = tuple(some_tokens(12 + 8 * number, VOCAB, number))
        spec = SequenceSpec(str(number), 0, "", prompt, len(prompt), sampling)
        sequences.append(Sequence(number, spec, stop_ids=(), hash_key=b"key"))
        scheduler.add(sequences[-1])
    flight: deque[tuple[StepPlan, Ending]] = deque()
    drafted = 0
    while True:
        while len(flight) < 2 and (plan := scheduler.schedule()) is not None:
            flight.append((plan, runner.start(plan)))
        if not flight:
            break
        plan, ending = flight.popleft()
        result = ending()
        drafted += result.drafted
        scheduler.complete(plan, result)
    assert bool(drafted) == (oracle is not None)
    return [sequence.token_ids for sequence in sequences]


@pytest.mark.long
@pytest.mark.parametrize("wrong", [0.4, 0.0])
def test_drafts_change_no_answer(folder: Path, wrong: float) -> None:
    plain, drafting = Recorder(), Recorder()
    expected = answers(folder, None, plain)
    found = answers(folder, Oracle(wrong, VOCAB, dict(enumerate(expected))), drafting)
    assert found == expected
    assert [len(tokens) for tokens in expected] == [19, 28]
    assert drafting.captured > plain.captured, "steps of more rows"
