"""The C++ sampler against ``engine.sampling.sampling``: the same tokens, whatever the
parameters."""

from __future__ import annotations

import math
import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from baton.grammar import Grammar, GrammarKind
from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.cpu import library
from engine.cpu.library import cpu_library
from engine.cpu.sampler import CpuSampler, cpu_sampler
from engine.engine import EngineSettings
from engine.offline import generate
from engine.sampling.grammar_state import Mask, pack, unpack
from engine.sampling.noise import lowbias32, noise_keys
from engine.sampling.sampling import SampleRow, _adjust, sample
from tests.support.engine.noise import noise_bits
from tests.support.engine.sampling import VOCAB, everything_masked
from tests.support.models import make_tiny_model

EDGE = 1e-5
"""Where the probability before a token is this near to top_p, or its score this near to min_p's
bound, sums in another order may keep the token or not."""
MASK = 0xFFFFFFFF

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def sampler() -> CpuSampler:
    found = cpu_sampler()
    assert found is not None
    return found


def some_logits(chance: random.Random, vocab: int) -> torch.Tensor:
    """fp32 [vocab]: peaked, flat, sorted, with many equals, or mostly forbidden."""
    generator = torch.Generator().manual_seed(chance.getrandbits(32))
    logits = torch.randn(vocab, generator=generator) * chance.choice((0.0, 0.5, 2.0, 6.0, 40.0))
    kind = chance.randrange(6)
    if kind == 0:
        logits = logits.round()
    elif kind == 1:
        logits = logits.sort(descending=chance.random() < 0.5).values
    elif kind == 2:
        allowed = torch.randint(0, vocab, (max(1, vocab // 20),), generator=generator)
        masked = torch.full((vocab,), -torch.inf)
        masked[allowed] = logits[allowed]
        logits = masked
    return logits


def some_row(chance: random.Random, vocab: int) -> SampleRow:
    def tokens(most: int) -> list[int]:
        return [chance.randrange(vocab) for _ in range(chance.randint(0, most))]

    def often(usual: float, *others: float) -> float:
        return chance.choice(others) if chance.random() < 0.4 else usual

    prompt, output = [chance.randrange(vocab), *tokens(12)], tokens(12)
    sampling = SamplingParams(
        temperature=often(1.0, 0.0, 0.01, 0.3, 0.7, 1.7),
        top_p=often(1.0, 0.99, 0.95, 0.6, 0.15, 1e-6, 0.0),
        top_k=int(often(0, 1, 2, 5, 20, 50, 1000, vocab - 1, vocab, vocab + 1)),
        min_p=often(0.0, 0.02, 0.3, 0.999, 1.0),
        seed=chance.getrandbits(64),
        min_tokens=int(often(0, 4, 9)),
        presence_penalty=often(0.0, 1.5, -1.5),
        frequency_penalty=often(0.0, 0.7, -0.3),
        repetition_penalty=often(1.0, 1.8, 0.6),
        logit_bias=tuple((t, often(2.5, -100.0, 100.0, -math.inf)) for t in sorted(set(tokens(3)))),
        bad_words=tuple((*output[len(output) - n :], chance.randrange(vocab)) for n in tokens(2)),
        allowed_token_ids=tuple(sorted(set(tokens(40)))) if chance.random() < 0.2 else (),
    )
    choice = chance.choice((0, 0, 1, 127))
    row = SampleRow(sampling, prompt + output, len(prompt), tuple(tokens(3)), choice)
    return masked(row, some_mask(chance, vocab)) if chance.random() < 0.4 else row


def some_mask(chance: random.Random, vocab: int) -> Mask:
    """A mask that allows few tokens, many, all, or long runs of them; at least one."""
    generator = np.random.default_rng(chance.getrandbits(32))
    bits = generator.random(vocab) < chance.choice((0.0, 0.001, 0.05, 0.5, 0.99, 1.0))
    if chance.random() < 0.3:
        start = chance.randrange(vocab)
        bits[start : start + chance.randint(1, vocab)] = chance.random() < 0.5
    bits[chance.randrange(vocab)] = True
    return pack(bits)


def masked(row: SampleRow, mask: Mask) -> SampleRow:
    grammar = Grammar(GrammarKind.JSON_OBJECT, "")
    return replace(row, sampling=replace(row.sampling, grammar=grammar), mask=mask)


def at_the_edge(logits: torch.Tensor, row: SampleRow, tokens: set[int]) -> bool:
    """Whether one of two different tokens is where top_p or min_p may keep it or not."""
    s = row.sampling
    if s.greedy:
        return False
    adjusted = logits if row.plain else _adjust(logits.clone(), row)
    scores, order = (adjusted / s.temperature).double().sort(descending=True, stable=True)
    if s.top_k:
        scores, order = scores[: s.top_k], order[: s.top_k]
    shares = scores.softmax(0)
    places = [int((order == token).nonzero()[0]) for token in tokens if token in order]
    before = shares.cumsum(0) - shares
    least = scores[0] + torch.tensor(s.min_p).double().log()
    return any(
        abs(before[place] - s.top_p) < EDGE or abs(scores[place] - least) < EDGE for place in places
    )


def check(sampler: CpuSampler, logits: torch.Tensor, rows: list[SampleRow]) -> None:
    """All rows in one call; a different token may only come from an edge, and seldom does."""
    before = logits.clone()
    found, expected = sampler.sample(logits, rows), sample(logits, rows)
    assert torch.equal(logits.nan_to_num(7e7), before.nan_to_num(7e7)), "the logits were changed"
    edges = 0
    for one, row, ours, theirs in zip(logits, rows, found, expected, strict=True):
        if ours != theirs:
            assert at_the_edge(one, row, {ours, theirs}), (ours, theirs, row)
            edges += 1
    assert edges <= len(rows) // 100 + 1


def check_many(sampler: CpuSampler, vocab: int, count: int, seed: int) -> None:
    chance = random.Random(seed)
    rows = [some_row(chance, vocab) for _ in range(count)]
    check(sampler, torch.stack([some_logits(chance, vocab) for _ in rows]), rows)


@pytest.mark.parametrize(("vocab", "count"), [(7, 1500), (16, 1500), (17, 1500), (320, 1500)])
@pytest.mark.parametrize("threads", [1, 3])
def test_any_mix_of_parameters(sampler: CpuSampler, vocab: int, count: int, threads: int) -> None:
    sampler.use_threads(threads)
    check_many(sampler, vocab, count, vocab * threads)


@pytest.mark.parametrize("vocab", [1, 7, 31, 32, 33, 320, 1000])
def test_only_what_a_mask_allows_is_drawn(sampler: CpuSampler, vocab: int) -> None:
    """Also where all other logits are greater, and where nothing but one token is allowed."""
    chance = random.Random(vocab)
    for _ in range(40):
        row = some_row(chance, vocab)
        mask = some_mask(chance, vocab)
        allowed = unpack(mask, vocab)
        logits = torch.randn(1, vocab) - 50 * torch.from_numpy(allowed)
        free = replace(row.sampling, bad_words=(), allowed_token_ids=())
        rows = [masked(replace(row, sampling=free), mask)]
        (token,) = sampler.sample(logits, rows)
        assert allowed[token]
        assert allowed[sample(logits, rows)[0]]


def test_a_whole_vocabulary(sampler: CpuSampler) -> None:
    check_many(sampler, 49152, 150, 5)


def test_a_vocabulary_of_no_whole_vectors(sampler: CpuSampler) -> None:
    check_many(sampler, 20_011, 60, 6)


@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.9, 0.95, 0.999])
def test_top_p_over_flat_and_peaked_rows(sampler: CpuSampler, top_p: float) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(300, 400, generator=generator) * torch.linspace(0, 8, 300)[:, None]
    rows = [
        SampleRow(SamplingParams(top_p=top_p, top_k=n % 3 * 100, seed=n), [0] * n, 0, ())
        for n in range(300)
    ]
    check(sampler, logits, rows)


BITS = (0, 1, 2, 3, 1 << 30, (1 << 31) - 1, 1 << 31, *(MASK - n for n in range(6)))


def _unmixed(x: int) -> int:
    """The inverse of ``lowbias32``."""

    def unshifted(x: int, by: int) -> int:
        found = x
        for _ in range(32 // by):
            found = x ^ (found >> by)
        return found

    x = unshifted(x, 16)
    x = (x * pow(0x846CA68B, -1, 1 << 32)) & MASK
    x = unshifted(x, 15)
    x = (x * pow(0x7FEB352D, -1, 1 << 32)) & MASK
    return unshifted(x, 16)


def _seed_of(bits: int, token: int, position: int, first: int) -> int:
    """The seed that gives a token these noise bits at this position; ``first`` is the first key."""
    second = (_unmixed(bits) - lowbias32(token ^ first)) & MASK
    golden = 0x9E3779B9
    b = (_unmixed(second) - golden) & MASK
    high = _unmixed(b) ^ lowbias32(position)
    low = _unmixed(_unmixed(first) ^ b) ^ lowbias32((position + golden) & MASK)
    return high << 32 | low


@pytest.mark.parametrize("bits", BITS)
def test_the_ends_of_the_noise(sampler: CpuSampler, bits: int) -> None:
    """From -3.1 to 22.9: the token with it against others as good as it and better."""
    generator = torch.Generator().manual_seed(bits)
    rows, logits = [], []
    for n in range(200):
        token, position = n % 40, 1 + n
        seed = _seed_of(bits, token, position, lowbias32(n))
        assert noise_bits(noise_keys(seed, 0, position), token) == bits
        rows.append(SampleRow(SamplingParams(seed=seed), [0] * position, 1, ()))
        one = torch.randn(40, generator=generator) * 0.2
        one[token] += (22.0, 10.0, 3.0, 0.0, -3.0, -10.0, -19.0, -22.0)[n % 8]
        logits.append(one)
    check(sampler, torch.stack(logits), rows)
    # Nothing but that noise: the highest wins over equals, the lowest loses.
    level = torch.zeros(1, 40)
    found = sampler.sample(level, rows[:1])
    assert (found == [0]) == (bits > MASK - 9)


MIXES = [
    SamplingParams(seed=9),
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.5, top_k=1),
    SamplingParams(top_k=5, seed=1),
    SamplingParams(top_k=5, top_p=0.5, min_p=0.5, seed=2),
    SamplingParams(top_p=0.5, seed=3),
    SamplingParams(top_p=0.0),
    SamplingParams(min_p=0.5, seed=4),
    SamplingParams(repetition_penalty=1.5, frequency_penalty=0.5, seed=5),
]


@pytest.mark.parametrize("vocab", [7, 16, 40, 1000])
def test_broken_logits_bring_the_token_that_torch_takes(sampler: CpuSampler, vocab: int) -> None:
    nan, inf = torch.nan, torch.inf
    level = torch.zeros(vocab)
    some = torch.randn(vocab, generator=torch.Generator().manual_seed(2))
    last, pair = torch.tensor([vocab - 1]), torch.tensor([3, 5])
    broken = [
        torch.full((vocab,), nan),
        torch.full((vocab,), -inf),
        torch.full((vocab,), inf),
        torch.full((vocab,), 3.4e38),
        torch.full((vocab,), -3.4e38),
        level.index_fill(0, last, nan),
        some.index_fill(0, pair, nan),
        some.index_fill(0, pair, inf),
        some.index_fill(0, pair, inf).index_fill(0, last, nan),
        some.index_fill(0, pair, -inf),
        torch.full((vocab,), -inf).index_fill(0, last, 0.0),
        torch.full((vocab,), -inf).index_fill(0, pair, 1e30),
        level,
        some * 1e38,
        some * 1e-42,
    ]
    for logits in broken:
        rows = [SampleRow(mix, [1, 2, 5, 5], 2, (3,)) for mix in MIXES]
        check(sampler, logits.repeat(len(rows), 1), rows)


def test_a_sequence_that_grows(sampler: CpuSampler) -> None:
    """Its prompt is looked at once; other sequences come and go."""
    chance = random.Random(4)
    logits = torch.randn(2, 50, generator=torch.Generator().manual_seed(4))
    sampling = SamplingParams(repetition_penalty=3.0, presence_penalty=0.5, temperature=0.3)
    tokens = [chance.randrange(50) for _ in range(20)]
    for step in range(60):
        other = [chance.randrange(50) for _ in range(1 + step % 30)]
        rows = [
            SampleRow(replace(sampling, seed=step), tokens, 20, ()),
            SampleRow(replace(sampling, seed=step), other, len(other), ()),
        ]
        if step % 7 == 0:
            rows, logits = rows[::-1], logits.flip(0)
        found = sampler.sample(logits[: 1 + step % 2], rows[: 1 + step % 2])
        assert found == sample(logits[: 1 + step % 2], rows[: 1 + step % 2])
        tokens.append(found[0])


def test_logits_as_they_lie_in_memory(sampler: CpuSampler) -> None:
    """One row for all, rows of a wider table, columns first, none."""
    generator = torch.Generator().manual_seed(8)
    rows = [SampleRow(SamplingParams(seed=n), [1], 1, ()) for n in range(8)]
    check(sampler, torch.randn(1, 33, generator=generator).expand(8, -1), rows)
    check(sampler, torch.randn(8, 40, generator=generator)[:, :33], rows)
    check(sampler, torch.randn(33, 8, generator=generator).T, rows)
    assert sampler.sample(torch.empty(0, 33), []) == []


def test_tokens_that_the_model_does_not_have_are_ignored(sampler: CpuSampler) -> None:
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    sampling = SamplingParams(
        temperature=0.0,
        min_tokens=5,
        repetition_penalty=2.0,
        presence_penalty=1.0,
        logit_bias=((3, 50.0), (1, 1.5)),
        bad_words=((-1, 3, 900),),
    )
    row = SampleRow(sampling, [2, 7, -1, 3], 2, (900, -5))
    assert sampler.sample(logits, [row]) == [1]
    some = replace(sampling, allowed_token_ids=(-3, 0, 2, 3, 900))
    assert sampler.sample(logits, [replace(row, sampling=some)]) == [2]


def test_the_only_token_that_is_allowed(sampler: CpuSampler) -> None:
    logits = torch.randn(1, 1000, generator=torch.Generator().manual_seed(3))
    for allowed, bad, found in (
        ((77,), (), 77),
        ((5, 998), ((1, 5),), 998),
        ((5, 998), ((5,),), 998),
    ):
        sampling = SamplingParams(allowed_token_ids=allowed, bad_words=bad, seed=1, top_p=0.9)
        for temperature in (0.0, 1.0):
            row = SampleRow(replace(sampling, temperature=temperature), [5, 1], 1, ())
            assert sampler.sample(logits, [row]) == [found] == sample(logits, [row])


@pytest.fixture
def other_target(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    cpu_library.cache_clear()
    yield monkeypatch
    cpu_library.cache_clear()


@pytest.mark.parametrize(
    "target", ["-march=x86-64-v3", pytest.param("-march=x86-64", marks=pytest.mark.long)]
)
def test_other_cpus(other_target: pytest.MonkeyPatch, target: str) -> None:
    if "avx2" not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this CPU has no AVX2")
    other_target.setattr(library, "_TARGET", target)
    sampler = cpu_sampler()
    assert sampler is not None
    for vocab, count in ((7, 200), (17, 200), (320, 400), (49152, 20)):
        check_many(sampler, vocab, count, vocab)
    for bits in BITS:
        test_the_ends_of_the_noise(sampler, bits)


def test_without_a_compiler_torch_draws_the_same_answers(
    other_target: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mixes = (SamplingParams(), SamplingParams(top_p=0.9), SamplingParams(repetition_penalty=1.3))
    specs = [
        SequenceSpec("", 0, "", (5, 6, 7), 3, replace(mix, seed=n, max_tokens=30, ignore_eos=True))
        for n, mix in enumerate(mixes)
    ]
    settings = EngineSettings(
        make_tiny_model(tmp_path), dtype="float32", device="cpu", threads=1, kv_pool_bytes=1 << 20
    )
    answers = generate(build_engine(settings), specs)
    cpu_library.cache_clear()
    other_target.setenv("CXX", "false")
    assert cpu_sampler() is None
    assert generate(build_engine(settings), specs) == answers


def test_what_is_allowed_comes_where_all_of_it_is_forbidden(sampler: CpuSampler) -> None:
    """As by the definition."""
    rows = everything_masked()
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(1))
    found = sampler.sample(logits, rows)
    assert found == sample(logits, rows)
    assert set(found) <= {5, 7}
