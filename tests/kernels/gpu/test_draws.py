"""The tokens that a draw may take, chosen for many rows at once, are those of the sampler."""

from __future__ import annotations

import random
from dataclasses import replace

import numpy as np
import torch

from baton.sampling_params import SamplingParams
from engine.gpu.draws import GREEDY, DrawArrays, draw_of, keep_allowed
from engine.gpu.kernels.sample import draw_reference
from engine.sampling.noise import noise_keys
from engine.sampling.sampling import SampleRow, sample_one

VOCAB = 200


def row(chance: random.Random) -> SampleRow:
    sampling = SamplingParams(
        temperature=chance.choice([0.0, 0.3, 1.0, 2.0]),
        top_k=chance.choice([0, 0, 1, 7, VOCAB, VOCAB + 5]),
        top_p=chance.choice([1.0, 1.0, 0.9, 0.3, 0.001]),
        min_p=chance.choice([0.0, 0.0, 0.05, 0.9]),
        seed=chance.getrandbits(64),
    )
    return SampleRow(sampling, [1, 2, 3], 3, ())


def test_draws_are_those_of_the_sampler() -> None:
    chance = random.Random(0)
    torch.manual_seed(0)
    for _ in range(40):
        rows = [row(chance) for _ in range(chance.randint(1, 9))]
        # Rounded, so that some scores are equal.
        logits = (torch.randn(len(rows), VOCAB) * 8).round() / 4
        draws = DrawArrays([draw_of(one.sampling, one.choice) for one in rows])
        found = draw_reference(
            keep_allowed(logits, draws),
            torch.from_numpy(draws.temperatures),
            torch.from_numpy(draws.keys(np.full(len(rows), 3))),
        )
        expected = [sample_one(logits[n], one) for n, one in enumerate(rows)]
        assert found.tolist() == expected


def test_rows_without_limits_are_left_as_they_are() -> None:
    logits = torch.randn(2, VOCAB)
    warm = draw_of(SamplingParams(temperature=1.0, seed=1), 0)
    assert keep_allowed(logits, DrawArrays([GREEDY, warm])) is logits
    limited = replace(warm, top_k=3)
    found = keep_allowed(logits, DrawArrays([warm, limited]))
    assert torch.equal(found[0], logits[0])
    assert int(found[1].isfinite().sum()) == 3


def test_a_greedy_draw_has_no_limits() -> None:
    params = SamplingParams(temperature=0.0, top_k=2, top_p=0.1, min_p=0.5)
    assert draw_of(params, 0) == GREEDY


def test_each_choice_has_noise_of_its_own() -> None:
    params = SamplingParams(temperature=1.0, seed=1)
    draws = DrawArrays([draw_of(params, choice) for choice in (0, 1)])
    first, second = draws.keys(np.array([1, 1])).tolist()
    assert (tuple(first), tuple(second)) == (noise_keys(1, 0, 1), noise_keys(1, 1, 1))
    assert first != second
