"""With ``deterministic`` a row's bits depend on the row alone."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import interpreter

from engine.scheduling.plan import PlanRow
from tests.kernels.gpu.device import INTERPRETED
from tests.kernels.gpu.steps.pairs import Recorder, Steps, gpu, load, save, some_tokens

TABLE = (20, 18, 16)
TOKENS = 40


@pytest.fixture(autouse=True)
def products_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """In numpy's matrix products a row's sums depend on where in the tile it lies.

    In those of a GPU they do not, nor in this.
    """

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_: Any) -> Any:
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    if INTERPRETED:
        monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def pieces(steps: Steps, tokens: list[int], counts: list[int], seed: int) -> torch.Tensor:
    """A prompt in chunks, each with strangers in the batch."""
    chance = random.Random(seed)
    found, start = [], 0
    for count in counts:
        rows = [(tokens, PlanRow(0, start, count, TABLE, True))]
        for number in range(chance.randint(0, 3)):
            length = chance.choice([1, 1, 6, 20])
            others = some_tokens(length + 8, 120, 100 + number + 10 * seed)
            first = chance.randint(0, 8) if length == 1 else 0
            rows.append((others, PlanRow(number + 1, first, length, (2 * number, 1), True)))
        chance.shuffle(rows)
        mine = next(n for n, (_, row) in enumerate(rows) if row.sequence_id == 0)
        found.append(steps.logits(rows)[mine])
        start += count
    return torch.cat(found)


def check(folder: Path, counts: list[int], dtype: torch.dtype = torch.float32) -> None:
    tokens = some_tokens(TOKENS, 120)
    whole = pieces(gpu(load(folder, dtype), deterministic=True), tokens, [TOKENS], 0)
    steps = gpu(load(folder, dtype), deterministic=True, capture=Recorder())
    assert torch.equal(pieces(steps, tokens, counts, 1), whole)


@pytest.mark.long
def test_a_prompt_in_pieces_with_strangers_gives_the_same_bits(tmp_path: Path) -> None:
    check(save(tmp_path, "llama", num_hidden_layers=1), [7, 1, 31, 1])


@pytest.mark.long
def test_a_draft_is_checked_in_the_bits_of_steps_without(tmp_path: Path) -> None:
    """A row for each token in one step, and a step for each."""
    folder = save(tmp_path, "llama", num_hidden_layers=2)
    tokens = some_tokens(TOKENS, 120)
    rows = [(tokens, PlanRow(0, 14 + place, 1, TABLE, True)) for place in range(3)]
    prompt = (tokens, PlanRow(0, 0, 14, TABLE, True))
    drafting = gpu(load(folder), deterministic=True, capture=Recorder())
    plain = gpu(load(folder), deterministic=True, capture=Recorder())
    drafting.logits([prompt])
    plain.logits([prompt])
    expected = [plain.logits([row])[0] for row in rows]
    assert torch.equal(torch.cat(drafting.logits(rows)), torch.cat(expected))
    assert torch.equal(drafting.cache.data, plain.cache.data)


@pytest.mark.long
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("llama", torch.bfloat16),
        ("gemma3", torch.float32),
        ("olmo2", torch.float32),
        ("qwen3_moe", torch.bfloat16),
        ("smollm3", torch.float32),
    ],
)
def test_so_do_all_families_and_types(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    check(save(tmp_path, name), [3, 14, 1, 1, 21], dtype)
