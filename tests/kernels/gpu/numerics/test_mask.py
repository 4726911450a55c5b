"""Grammars' masks on the GPU against those of the CPU's draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from baton.grammar import Grammar, GrammarKind
from baton.sampling_params import SamplingParams
from engine.gpu.kernels.sample import draw, forbid, forbid_launch, forbid_reference
from engine.sampling.grammar_state import Mask, pack
from engine.sampling.noise import noise_keys
from engine.sampling.sampling import SampleRow, sample_one
from tests.kernels.gpu.device import DEVICE

ROWS = 5


def some_masks(count: int, vocab: int, share: float) -> list[Mask]:
    generator = np.random.default_rng(vocab)
    bits = generator.random((count, vocab)) < share
    bits[:, generator.integers(vocab)] = True
    return [pack(row) for row in bits]


@pytest.mark.parametrize("vocab", [1, 31, 32, 33, 4096, 4097, 9000])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_it_forbids_what_the_reference_does(vocab: int, share: float) -> None:
    """Also bit 31 of a word, whose number is negative."""
    rows = [3, 0, 2]
    masks = some_masks(len(rows), vocab, share)
    expected = torch.randn(ROWS, vocab)
    # A view with a stride of its own, as logits of a captured step are.
    found = torch.zeros(ROWS, vocab + 7)[:, :vocab].to(DEVICE)
    found.copy_(expected)
    forbid_reference(expected, rows, masks)
    forbid(found, rows, masks)
    assert torch.equal(found.cpu(), expected)


def test_it_leads_to_the_tokens_that_the_engine_draws() -> None:
    vocab = 5000
    logits = torch.randn(ROWS, vocab) * 2
    masks = some_masks(ROWS, vocab, 0.01)
    sampling = SamplingParams(temperature=0.8, grammar=Grammar(GrammarKind.JSON_OBJECT, ""))
    expected = [
        sample_one(numbers, SampleRow(sampling, [1, 2, 3], 3, (), mask=mask))
        for numbers, mask in zip(logits, masks, strict=True)
    ]
    keys = torch.tensor([noise_keys(sampling.seed, 0, 3)] * ROWS, device=DEVICE)
    ours = logits.to(DEVICE)
    forbid(ours, range(ROWS), masks)
    assert draw(ours, torch.full((ROWS,), 0.8, device=DEVICE), keys).tolist() == expected


def test_no_row_needs_no_launch() -> None:
    logits = torch.randn(2, 40)
    before = logits.clone()
    forbid(logits, [], [])
    assert torch.equal(logits, before)


def test_what_does_not_fit_is_refused() -> None:
    rows, masks = torch.zeros(2, dtype=torch.int32), torch.zeros(2, 2, dtype=torch.int32)
    for logits, numbers, words in (
        (torch.zeros(3, 40, dtype=torch.float16), rows, masks),
        (torch.zeros(3, 40), rows.long(), masks),
        (torch.zeros(3, 40), rows, masks.long()),
        (torch.zeros(3, 65), rows, masks),
        (torch.zeros(3, 40), rows[:1], masks),
        (torch.zeros(40, 3).T, rows, masks),
    ):
        with pytest.raises(ValueError, match=r"fp32|int32|masks must be|contiguous"):
            forbid_launch(logits, numbers, words)
