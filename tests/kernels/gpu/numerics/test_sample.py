"""Tokens drawn on the GPU against those that the engine draws."""

from __future__ import annotations

import math
import random

import pytest
import torch

from baton.sampling_params import SamplingParams
from engine.gpu.kernels.sample import MARGIN, draw, draw_reference
from engine.sampling.noise import noise_keys
from engine.sampling.sampling import SampleRow, sample_one
from tests.kernels.gpu.device import DEVICE

ROWS = 8


def random_keys(seed: int) -> torch.Tensor:
    source = random.Random(seed)
    pairs = [noise_keys(source.getrandbits(64), 0, source.randrange(10**6)) for _ in range(ROWS)]
    return torch.tensor(pairs)


@pytest.mark.parametrize(
    ("vocab", "margin"),
    [
        *((vocab, MARGIN) for vocab in (1, 2048, 2049, 5000)),
        *((vocab, 1e9) for vocab in (2, 100, 2049)),
        *(pytest.param(vocab, MARGIN, marks=pytest.mark.long) for vocab in (2, 100)),
        *(pytest.param(vocab, 1e9, marks=pytest.mark.long) for vocab in (1, 2048, 5000)),
    ],
)
def test_the_tokens_are_those_of_the_reference(vocab: int, margin: float) -> None:
    temperatures = torch.tensor([0.0, 0.0, 1.0, 0.7, 1.0, 2.0, 0.01, 1.3])
    for seed in range(2):
        logits, keys = torch.randn(ROWS, vocab) * 3, random_keys(seed)
        found = draw(logits.to(DEVICE), temperatures.to(DEVICE), keys.to(DEVICE), margin=margin)
        assert found.tolist() == draw_reference(logits, temperatures, keys).tolist()


def test_near_ties_are_decided_in_float64() -> None:
    """Nearly equal logits at a low temperature: sums of fp32 could not tell them apart."""
    logits = 5000 + torch.rand(ROWS, 3000) * 1e-3
    temperatures, keys = torch.full((ROWS,), 1.0), random_keys(1)
    found = draw(logits.to(DEVICE), temperatures.to(DEVICE), keys.to(DEVICE))
    assert found.tolist() == draw_reference(logits, temperatures, keys).tolist()


def test_they_are_what_the_engine_draws() -> None:
    logits = torch.randn(ROWS, 5000) * 2
    seeds = [random.Random(row).getrandbits(64) for row in range(ROWS)]
    keys = torch.tensor([noise_keys(seed, 0, 3) for seed in seeds])
    rows = [
        SampleRow(SamplingParams(temperature=0.8, seed=seed), [1, 2, 3], 3, ()) for seed in seeds
    ]
    found = draw(logits.to(DEVICE), torch.full((ROWS,), 0.8, device=DEVICE), keys.to(DEVICE))
    expected = [sample_one(numbers, row) for numbers, row in zip(logits, rows, strict=True)]
    assert found.tolist() == expected


def test_the_lower_of_equals_wins_and_broken_logits_are_drawn() -> None:
    vocab = 5000
    logits = torch.zeros(ROWS, vocab)
    logits[0, [4000, 17, 3000]] = 1.0
    logits[1] = -math.inf
    logits[2, [4999, 30]] = math.nan
    logits[3] = -math.inf
    logits[3, 2500] = 0.0
    logits[4, [2500, 9]] = math.inf
    logits[5] = -math.inf
    logits[6, 77] = math.nan
    temperatures = torch.tensor([0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0, 0.0])
    keys = random_keys(0)
    found = draw(logits.to(DEVICE), temperatures.to(DEVICE), keys.to(DEVICE))
    assert found.tolist() == [17, 0, 30, 2500, 9, 0, 77, 0]


def test_rows_may_be_part_of_a_wider_tensor() -> None:
    logits, keys = torch.randn(ROWS, 300), random_keys(2)
    ones = torch.ones(ROWS)
    found = draw(logits.to(DEVICE)[:, :200], ones.to(DEVICE), keys.to(DEVICE))
    assert found.tolist() == draw_reference(logits[:, :200], ones, keys).tolist()


def test_what_does_not_fit_is_refused() -> None:
    logits, ones = torch.zeros(2, 8, device=DEVICE), torch.ones(2, device=DEVICE)
    keys = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    for numbers, temperatures, pairs in (
        (logits.half(), ones, keys),
        (logits[:, :0], ones, keys),
        (logits[:, ::2], ones, keys),
        (logits, ones[1:], keys),
        (logits, ones.double(), keys),
        (logits, ones, keys.int()),
        (logits, ones, keys[:, :1]),
    ):
        with pytest.raises(ValueError, match=r"\w"):
            draw(numbers, temperatures, pairs)
