"""Counter-based noise: tensors against integers, and what makes it fit for drawing tokens."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.noise import (
    gumbel,
    lowbias32,
    noise_bits_tensor,
    noise_keys,
    noise_keys_of,
)
from tests.support.engine.noise import noise_bits

WORD = 1 << 32
EULER_GAMMA = 0.5772156649015329
KEYS = (0x0A85A452, 0xDED0E2EA)
BITS = [0x0C25B608, 0x1FD95392, 0x981332D5]
words = st.integers(0, WORD - 1)


def uninvert_shift(x: int, shift: int) -> int:
    """The inverse of ``x ^ (x >> shift)``."""
    found = x
    for _ in range(32 // shift + 1):
        found = x ^ (found >> shift)
    return found


def unmixed(x: int) -> int:
    """The inverse of ``lowbias32``, from its published steps read backwards."""
    x = uninvert_shift(x, 16)
    x = x * pow(0x846CA68B, -1, WORD) % WORD
    x = uninvert_shift(x, 15)
    x = x * pow(0x7FEB352D, -1, WORD) % WORD
    return uninvert_shift(x, 16)


@given(words)
@settings(deadline=None, derandomize=True)
def test_the_mixer_loses_nothing(x: int) -> None:
    assert 0 <= lowbias32(x) < WORD
    assert unmixed(lowbias32(x)) == x


@given(words, words, st.lists(words, min_size=1, max_size=20))
@settings(deadline=None, derandomize=True)
def test_tensors_hold_what_integers_say(first: int, second: int, token_ids: list[int]) -> None:
    edges = [0, 1, (1 << 31) - 1, 1 << 31, WORD - 1]
    ids = torch.tensor(token_ids + edges)
    keys = (first, second)
    assert noise_bits_tensor(keys, ids).tolist() == [noise_bits(keys, t) for t in ids.tolist()]


@pytest.mark.parametrize("token_id", [0, 7, 49151, WORD - 1])
def test_gumbel_noise_is_made_of_the_bits(token_id: int) -> None:
    keys = noise_keys(5, 0, 9)
    uniform = (noise_bits(keys, token_id) + 0.5) / WORD
    expected = -math.log(-math.log(uniform))
    found = gumbel(keys, torch.tensor([token_id]))
    assert found.dtype == torch.float64
    assert found.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("bits", [0, WORD - 1])
def test_gumbel_noise_is_finite_at_the_ends(bits: int) -> None:
    """The keys are chosen so that a tokens bits are the smallest and the largest there are."""
    keys = (0, (unmixed(bits) - lowbias32(3)) % WORD)
    assert noise_bits(keys, 3) == bits
    assert math.isfinite(gumbel(keys, torch.tensor([3])).item())


def test_keys_differ_for_seeds_choices_and_positions() -> None:
    seeds = [*range(40), 1 << 32, (1 << 32) + 1, 1 << 63, (1 << 64) - 1]
    draws = [(s, c, p) for s in seeds for c in range(3) for p in (*range(40), 4095, 131071)]
    assert len({noise_keys(*draw) for draw in draws}) == len(draws)


def test_noise_depends_on_the_token_alone_and_not_on_its_place() -> None:
    keys = noise_keys(1, 0, 2)
    ids = torch.arange(1000)
    shuffled = ids[torch.randperm(1000, generator=torch.Generator().manual_seed(0))]
    assert torch.equal(gumbel(keys, ids)[shuffled], gumbel(keys, shuffled))


def test_this_noise_is_for_ever() -> None:
    """Seeded answers repeat across versions: these numbers must never change."""
    assert noise_keys(0x0123456789ABCDEF, 0, 100) == KEYS
    assert noise_bits_tensor(KEYS, torch.arange(3)).tolist() == BITS


def test_keys_of_many_draws_are_those_of_each() -> None:
    chance = random.Random(4)
    draws = [
        (chance.getrandbits(64), chance.randrange(128), chance.randrange(1 << 21))
        for _ in range(500)
    ]
    draws += [(0, 0, 0), (2**64 - 1, 127, 2**31 - 1), (2**63, 1, 1)]
    seeds, choices, positions = zip(*draws, strict=True)
    found = noise_keys_of(np.array(seeds, dtype=np.uint64), np.array(choices), np.array(positions))
    assert found.dtype == np.int64
    assert [tuple(keys) for keys in found.tolist()] == [noise_keys(*draw) for draw in draws]


def test_the_distribution_is_gumbels() -> None:
    noise = gumbel(noise_keys(11, 0, 3), torch.arange(200_000))
    assert noise.mean().item() == pytest.approx(EULER_GAMMA, abs=0.02)
    assert noise.var().item() == pytest.approx(math.pi**2 / 6, abs=0.05)
    ordered = noise.sort().values
    expected = (torch.arange(len(ordered)) + 0.5) / len(ordered)
    distance = (torch.exp(-torch.exp(-ordered)) - expected).abs().max().item()
    # Kolmogorov and Smirnov: beyond 2.2 / sqrt(n) once in ten thousand fair sets.
    assert distance < 2.2 / math.sqrt(len(ordered))


@pytest.mark.parametrize(
    ("first", "second"),
    [
        pytest.param((0, 0, 0), (1, 0, 0), id="seeds"),
        pytest.param((0, 0, 0), (1 << 32, 0, 0), id="high halves of seeds"),
        pytest.param((0, 0, 0), (0, 1, 0), id="choices"),
        pytest.param((0, 0, 0), (0, 0, 1), id="positions"),
        pytest.param((1, 0, 0), (0, 0, 1), id="seed for position"),
    ],
)
def test_neighbouring_draws_are_not_alike(
    first: tuple[int, int, int], second: tuple[int, int, int]
) -> None:
    ids = torch.arange(50_000)
    pair = torch.stack([gumbel(noise_keys(*draw), ids) for draw in (first, second)])
    assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.02


def test_neighbouring_tokens_are_not_alike() -> None:
    noise = gumbel(noise_keys(3, 0, 7), torch.arange(50_000))
    for lag in (1, 2, 16, 256):
        pair = torch.stack((noise[:-lag], noise[lag:]))
        assert abs(torch.corrcoef(pair)[0, 1].item()) < 0.02
