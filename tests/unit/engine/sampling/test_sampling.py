"""Drawing a token against a plain implementation in numpy, written from the design."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from baton.sampling_params import SamplingParams
from engine.sampling.noise import noise_keys
from engine.sampling.sampling import SampleRow, sample, sample_one
from tests.support.engine.noise import noise_bits
from tests.support.engine.sampling import VOCAB, everything_masked

Floats = npt.NDArray[np.float64]
NEAR = 1e-4
"""Two numbers that are closer than this may fall either way in 32 bits."""


def adjusted(logits: Floats, row: SampleRow) -> Floats:
    s, found = row.sampling, logits.copy()
    outputs = row.token_ids[row.prompt_length :]
    for token in range(len(found)):
        if token in row.token_ids:
            found[token] *= 1 / s.repetition_penalty if found[token] > 0 else s.repetition_penalty
        if token in outputs:
            found[token] -= s.presence_penalty
        found[token] -= s.frequency_penalty * outputs.count(token)
        found[token] += dict(s.logit_bias).get(token, 0.0)
        if token in row.stop_ids and len(outputs) < s.min_tokens:
            found[token] = -math.inf
        if any([*outputs, token][-len(word) :] == list(word) for word in s.bad_words):
            found[token] = -math.inf
        if s.allowed_token_ids and token not in s.allowed_token_ids:
            found[token] = -math.inf
    return found


def kept(logits: Floats, s: SamplingParams) -> list[int]:
    """The token ids that may be drawn from adjusted logits; rejects the cases near an edge."""
    with np.errstate(over="ignore"):
        scores = logits / s.temperature
    order = sorted(range(len(scores)), key=lambda token: (-scores[token], token))
    if s.top_k:
        order = order[: s.top_k]
    weights = np.exp(scores[order] - scores[order[0]])
    shares = weights / weights.sum()
    if s.top_p < 1:
        before = np.concatenate(([0.0], np.cumsum(shares)[:-1]))
        assume(np.abs(before[1:] - s.top_p).min(initial=1) > NEAR)
        order = [token for token, b in zip(order, before, strict=True) if b < s.top_p or b == 0]
    if s.min_p > 0:
        ratios = np.exp(scores[order] - scores[order[0]])
        assume(np.abs(ratios[1:] - s.min_p).min(initial=1) > NEAR)
        order = [token for token, r in zip(order, ratios, strict=True) if r >= s.min_p]
    return order


def drawn(logits: torch.Tensor, row: SampleRow) -> int:
    """What ``sample_one`` must return; rejects near ties."""
    found = adjusted(logits.double().numpy(), row)
    s = row.sampling
    if s.greedy:
        return int(np.argmax(found))
    keys = noise_keys(s.seed, row.choice, len(row.token_ids))
    noisy = {
        token: found[token] / s.temperature
        - math.log(-math.log((noise_bits(keys, token) + 0.5) / 2**32))
        for token in kept(found, s)
    }
    best = sorted(noisy.values())[-2:]
    assume(len(best) == 1 or best[1] - best[0] > NEAR or best[0] == -math.inf)
    return max(noisy, key=lambda token: noisy[token])


def runs_of(prompt: list[int], outputs: list[int]) -> st.SearchStrategy[tuple[int, ...]]:
    """Bad words; many are likely next tokens."""
    known = [*prompt, *outputs]
    token = st.integers(0, VOCAB - 1)
    ends = st.integers(0, 3).map(lambda length: tuple(known[len(known) - length :]))
    return st.one_of(
        st.tuples(ends, token).map(lambda pair: (*pair[0], pair[1])),
        st.lists(token, min_size=1, max_size=3).map(tuple),
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[torch.Tensor, SampleRow]:
    """Logits [VOCAB] and a row with any mix of parameters."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 20)))
    logits = torch.randn(VOCAB, generator=generator) * draw(st.sampled_from((0.3, 2.0, 6.0)))
    tokens = st.integers(0, VOCAB - 1)
    prompt = draw(st.lists(tokens, min_size=1, max_size=8))
    outputs = draw(st.lists(tokens, max_size=8))
    stops = draw(st.lists(tokens, max_size=3, unique=True))
    biased = draw(st.lists(tokens, max_size=3, unique=True))
    sampling = SamplingParams(
        temperature=draw(st.sampled_from((0.0, 0.2, 0.7, 1.0, 1.7))),
        top_p=draw(st.sampled_from((1.0, 0.95, 0.6, 0.15, 1e-6))),
        top_k=draw(st.sampled_from((0, 1, 2, 5, 20, VOCAB, 100))),
        min_p=draw(st.sampled_from((0.0, 0.02, 0.3, 0.999))),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        min_tokens=draw(st.sampled_from((0, 4, 9))),
        presence_penalty=draw(st.sampled_from((0.0, 1.5, -1.5))),
        frequency_penalty=draw(st.sampled_from((0.0, 0.7, -0.7))),
        repetition_penalty=draw(st.sampled_from((1.0, 1.8, 0.6))),
        logit_bias=tuple((t, draw(st.sampled_from((-100.0, -1.0, 2.5, 100.0)))) for t in biased),
        bad_words=tuple(draw(st.lists(runs_of(prompt, outputs), max_size=2))),
    )
    if draw(st.integers(0, 3)) == 0:
        # At least one of them may be drawn.
        kept_out = {*stops, *(word[-1] for word in sampling.bad_words)}
        free = next(token for token in range(VOCAB) if token not in kept_out)
        allowed = {free, *draw(st.lists(tokens, max_size=5))}
        sampling = replace(sampling, allowed_token_ids=tuple(sorted(allowed)))
    choice = draw(st.integers(0, 3))
    return logits, SampleRow(sampling, prompt + outputs, len(prompt), tuple(stops), choice)


@settings(max_examples=400, deadline=None, derandomize=True)
@given(cases())
def test_any_mix_of_parameters(case: tuple[torch.Tensor, SampleRow]) -> None:
    logits, row = case
    before = logits.clone()
    expected = drawn(logits, row)
    assert sample_one(logits, row) == expected
    assert torch.equal(logits, before), "the logits were changed"


@settings(max_examples=40, deadline=None, derandomize=True)
@given(st.lists(cases(), min_size=1, max_size=6))
def test_a_batch_draws_what_each_row_draws_alone(
    batch: list[tuple[torch.Tensor, SampleRow]],
) -> None:
    logits = torch.stack([logits for logits, _ in batch])
    rows = [row for _, row in batch]
    alone = [sample(logits[i : i + 1], rows[i : i + 1])[0] for i in range(len(rows))]
    assert sample(logits, rows) == alone
    assert sample(logits.flip(0), rows[::-1]) == alone[::-1]


def row_of(
    sampling: SamplingParams, outputs: tuple[int, ...] = (), stops: tuple[int, ...] = ()
) -> SampleRow:
    return SampleRow(sampling, [1, 2, *outputs], 2, stops)


def support(logits: torch.Tensor, sampling: SamplingParams, draws: int = 300) -> set[int]:
    """All tokens that ``draws`` seeds bring."""
    return {sample_one(logits, row_of(replace(sampling, seed=seed))) for seed in range(draws)}


def test_each_filter_keeps_what_it_says() -> None:
    shares = torch.tensor([0.05, 0.4, 0.2, 0.05, 0.3])
    logits = shares.log()
    plain = SamplingParams()
    assert support(logits, plain) == {0, 1, 2, 3, 4}
    assert support(logits, replace(plain, top_k=2)) == {1, 4}
    assert support(logits, replace(plain, top_k=5)) == {0, 1, 2, 3, 4}
    assert support(logits, replace(plain, top_p=0.39)) == {1}
    assert support(logits, replace(plain, top_p=0.41)) == {1, 4}
    assert support(logits, replace(plain, top_p=0.71)) == {1, 2, 4}
    assert support(logits, replace(plain, min_p=0.49)) == {1, 2, 4}
    assert support(logits, replace(plain, min_p=0.51)) == {1, 4}
    assert support(logits, replace(plain, min_p=1.0)) == {1}
    # The shares of top_p are those among the tokens that top_k has left: 0.4 of 0.7.
    assert support(logits, replace(plain, top_k=2, top_p=0.56)) == {1}
    assert support(logits, replace(plain, top_k=2, top_p=0.58)) == {1, 4}


def test_temperature_comes_before_top_p_and_min_p() -> None:
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    flat = SamplingParams(temperature=100.0)
    assert support(logits, replace(flat, top_p=0.74)) == {0, 1, 2}
    assert support(logits, replace(flat, min_p=0.9)) == {0, 1, 2, 3}
    assert support(logits, replace(flat, temperature=0.1, top_p=0.9)) == {0}


def test_draws_follow_the_softmax() -> None:
    """Pearson's chi-square over 4000 seeds: with 7 degrees of freedom above 35 once in 10⁵."""
    logits = torch.tensor([2.0, -1.0, 0.5, 1.0, 0.0, -0.5, 1.5, 0.2])
    for sampling in (SamplingParams(), SamplingParams(temperature=1.7)):
        shares = (logits / sampling.temperature).softmax(0)
        counts = torch.zeros(8)
        for seed in range(4000):
            counts[sample_one(logits, row_of(replace(sampling, seed=seed)))] += 1
        assert _chi_square(counts, shares) < 35


def test_draws_at_following_positions_follow_the_softmax() -> None:
    logits = torch.tensor([2.0, -1.0, 0.5, 1.0, 0.0, -0.5, 1.5, 0.2])
    counts, pairs, last = torch.zeros(8), torch.zeros(8, 8), 0
    for position in range(4000):
        row = SampleRow(SamplingParams(seed=12345), [0] * position, 0, ())
        token = sample_one(logits, row)
        counts[token] += 1
        pairs[last, token] += 1
        last = token
    shares = logits.softmax(0)
    assert _chi_square(counts, shares) < 35
    # One token says nothing about the next: 63 degrees of freedom, above 120 once in 10⁵.
    assert _chi_square(pairs.flatten(), torch.outer(shares, shares).flatten()) < 120


def _chi_square(counts: torch.Tensor, shares: torch.Tensor) -> float:
    expected = shares * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def test_seed_and_position_decide_and_tokens_do_not() -> None:
    logits = torch.zeros(1000)
    sampling = SamplingParams(seed=7)
    drawn_by_seed = {sample_one(logits, row_of(replace(sampling, seed=n))) for n in range(20)}
    drawn_by_high = {sample_one(logits, row_of(replace(sampling, seed=n << 32))) for n in range(20)}
    by_position = {sample_one(logits, SampleRow(sampling, [0] * n, 1, ())) for n in range(1, 21)}
    assert min(len(drawn_by_seed), len(drawn_by_high), len(by_position)) > 15
    # The border between prompt and output, and the tokens themselves, change no noise.
    one = sample_one(logits, SampleRow(sampling, [1, 2, 3, 4], 4, ()))
    assert one == sample_one(logits, SampleRow(sampling, [9, 8, 7, 6], 1, ()))


def test_a_filter_changes_the_draw_only_where_it_forbids_it() -> None:
    """Noise belongs to token ids: what remains keeps its noise, in whatever order it is."""
    logits = torch.randn(50, generator=torch.Generator().manual_seed(4))
    allowed = set(logits.topk(20).indices.tolist())
    for seed in range(100):
        free = SamplingParams(seed=seed)
        token = sample_one(logits, row_of(free))
        if token in allowed:
            assert sample_one(logits, row_of(replace(free, top_k=20))) == token


@pytest.mark.parametrize("size", [12, 200, 5000])
def test_the_lower_id_wins_every_tie(size: int) -> None:
    logits = torch.zeros(size)
    logits[3:] = 1.0
    greedy = SamplingParams(temperature=0.0)
    assert sample_one(logits, row_of(greedy)) == 3
    assert sample(logits.expand(3, -1), [row_of(greedy)] * 3) == [3, 3, 3]
    biased = replace(greedy, logit_bias=((0, 1.0),))
    assert sample(logits.expand(2, -1), [row_of(greedy), row_of(biased)]) == [3, 0]
    assert support(logits, SamplingParams(top_k=1), 20) == {3}
    assert support(logits, SamplingParams(top_k=4)) == {3, 4, 5, 6}
    assert support(logits, SamplingParams(top_p=3.5 / size)) <= {3, 4, 5, 6}
    assert support(logits, SamplingParams(top_k=4, top_p=0.6)) == {3, 4, 5}


def test_a_low_temperature_is_greedy() -> None:
    generator = torch.Generator().manual_seed(1)
    for seed in range(50):
        logits = 3 * torch.randn(500, generator=generator)
        top = logits.topk(2).values
        cold = SamplingParams(temperature=1e-3, seed=seed)
        if top[0] - top[1] > 0.05:
            assert sample_one(logits, row_of(cold)) == int(logits.argmax())


def test_the_lowest_temperature_with_the_highest_bias_stays_finite() -> None:
    sampling = SamplingParams(temperature=1e-3, top_p=0.9, min_p=0.1, logit_bias=((5, 100.0),))
    assert support(torch.linspace(-60, 60, 10), sampling, 10) == {5}
    assert support(torch.zeros(10), sampling, 10) == {5}


def test_no_stop_token_before_min_tokens() -> None:
    logits = torch.zeros(6)
    logits[4] = 50.0
    sampling = SamplingParams(temperature=0.0, min_tokens=2, logit_bias=((4, 100.0),))
    assert sample_one(logits, row_of(sampling, (), stops=(4,))) != 4
    assert sample_one(logits, row_of(sampling, (0,), stops=(4,))) != 4
    assert sample_one(logits, row_of(sampling, (0, 0), stops=(4,))) == 4
    assert sample_one(logits, row_of(sampling)) == 4, "no stop token was named"
    warm = replace(sampling, temperature=1.0)
    assert support(logits, warm, 5) == {4}
    draws = {sample_one(logits, row_of(replace(warm, seed=n), (), (4, 5))) for n in range(100)}
    assert draws == {0, 1, 2, 3}


def test_penalties_know_prompt_from_output() -> None:
    logits = torch.tensor([1.0, 1.2, 1.1, -1.0])
    greedy = SamplingParams(temperature=0.0)
    for penalty in (
        replace(greedy, presence_penalty=2.0),
        replace(greedy, frequency_penalty=2.0),
    ):
        # Token 1 stands in the prompt alone, then in the answer too.
        assert sample_one(logits, row_of(penalty)) == 1
        assert sample_one(logits, row_of(penalty, (1,))) == 2
    assert sample_one(logits, row_of(replace(greedy, repetition_penalty=2.0))) == 0
    counted = replace(greedy, frequency_penalty=0.06)
    assert sample_one(logits, row_of(counted, (1,))) == 1
    assert sample_one(logits, row_of(counted, (1, 1))) == 2
    once = replace(greedy, presence_penalty=0.06)
    assert sample_one(logits, row_of(once, (1, 1))) == 1
    negative = replace(greedy, repetition_penalty=0.1, logit_bias=((0, -9), (1, -9), (2, -9)))
    assert sample_one(-logits.abs() - 5, SampleRow(negative, [3], 1, ())) == 3


def test_broken_logits_still_bring_a_token() -> None:
    """One sequence's overflow must not end the step of all others."""
    mix = SamplingParams(top_p=0.5, min_p=0.5)
    for logits in (
        torch.full((40,), torch.nan),
        torch.zeros(40).index_fill(0, torch.tensor([7]), torch.nan),
    ):
        for top_k in (0, 1, 5):
            for sampling in (mix, replace(mix, top_p=1.0), replace(mix, min_p=0.0)):
                assert 0 <= sample_one(logits, row_of(replace(sampling, top_k=top_k))) < 40


def test_what_is_allowed_comes_where_all_of_it_is_forbidden() -> None:
    """And not token 0, which is not allowed."""
    rows = everything_masked()
    assert set(sample(torch.zeros(len(rows), VOCAB), rows)) <= {5, 7}
    logits = torch.zeros(len(rows), VOCAB)
    logits[:, 7] = 100.0
    assert sample(logits, rows) == [7] * len(rows)


def test_what_is_forbidden_stays_so_where_something_else_may_come() -> None:
    logits = torch.zeros(1, VOCAB)
    logits[0, 7] = 100.0
    sampling = SamplingParams(temperature=0.0, allowed_token_ids=(5, 7), bad_words=((7,),))
    assert sample(logits, [SampleRow(sampling, [1], 1, ())]) == [5]
