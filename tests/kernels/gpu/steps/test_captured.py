"""Captured decode steps: padding touches nothing, sizes are captured once, tokens are the same."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from engine.sampling.step import StepInput
from tests.kernels.gpu.steps.pairs import (
    BLOCK,
    TABLES,
    UNTOUCHED,
    Recorder,
    check_equal,
    gpu,
    load,
    reference,
    rows_of,
    save,
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(tmp_path_factory.mktemp("llama"), "llama", num_hidden_layers=1)


EITHER_WAY = pytest.mark.parametrize(
    "deterministic", [False, pytest.param(True, marks=pytest.mark.long)]
)


@EITHER_WAY
def test_captured_steps_compute_the_same(folder: Path, deterministic: bool) -> None:
    recorder = Recorder()
    model = load(folder)
    vocab = model.config.vocab_size
    captured = gpu(load(folder), capture=recorder, deterministic=deterministic)
    check_equal(captured, reference(model), vocab)
    # Three rows, in a graph of four; mixed steps and prompts are not captured.
    assert (recorder.captured, recorder.replayed) == (1, 1)
    captured.logits(rows_of(((0, 34, 1), (1, 20, 1), (2, 4, 1), (3, 0, 1)), vocab))
    assert (recorder.captured, recorder.replayed) == (1, 2)
    captured.logits(rows_of(((3, 0, 1),), vocab))
    assert (recorder.captured, recorder.replayed) == (2, 3)


@pytest.mark.long
@EITHER_WAY
def test_padding_and_warming_up_write_no_block(folder: Path, deterministic: bool) -> None:
    recorder = Recorder()
    steps = gpu(load(folder), capture=recorder, deterministic=deterministic)
    steps.model.warm_up()
    # 1, 2, 4 and 8 rows of a context that is the shortest size.
    assert recorder.captured == 4
    assert bool((steps.cache.data == UNTOUCHED).all())
    steps.logits(rows_of(((0, 20, 1), (1, 3, 1), (2, 4, 1)), 120))
    assert recorder.captured == 4
    untouched = (steps.cache.data == UNTOUCHED).all(dim=-1).all(dim=1).all(dim=1).all(dim=1)
    written = {(int(block), int(slot)) for block, slot in (~untouched).nonzero().tolist()}
    assert written == {
        (TABLES[0][20 // BLOCK], 20 % BLOCK),
        (TABLES[1][0], 3),
        (TABLES[2][0], 4),
    }


def test_the_likeliest_tokens_and_outputs_in_any_order(folder: Path) -> None:
    model = load(folder)
    vocab = model.config.vocab_size
    expected, steps = reference(model), gpu(load(folder), capture=Recorder())
    for step in (((0, 0, 5), (1, 0, 1), (2, 0, 1)), ((0, 5, 1), (1, 1, 1), (2, 1, 1))):
        rows = rows_of(step, vocab)
        tokens = [t for ids, row in rows for t in ids[row.start : row.start + row.count]]
        plan = tuple(row for _, row in rows)
        last = len(tokens) - 1
        for outputs in ([last, 0], []):
            asked = StepInput(plan, tokens, outputs, True)
            assert steps.model.run(asked).best == expected.model.run(asked).best
            logits = steps.model.run(StepInput(plan, tokens, outputs, False)).logits
            wanted = expected.model.run(StepInput(plan, tokens, outputs, False)).logits
            torch.testing.assert_close(logits, wanted, atol=1e-4, rtol=0)
