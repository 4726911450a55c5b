"""EAGLE-3 and Medusa heads draft in real steps of a tiny model: they change no answer."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from baton.request import GroupShape
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.engine import EngineSettings, warm_up
from engine.scheduling.block_pool import BlockPool
from engine.speculation.model.length import ModelDraftLength
from tests.support.drafter_heads import (
    make_counting_eagle,
    make_counting_medusa,
    make_counting_model,
    make_eagle_head,
)
from tests.support.engine.draft_model import SAMPLINGS, Bench, some_tokens
from tests.support.engine.drafters import FixedLength
from tests.support.models import EOS, make_tiny_model

GREEDY = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
SEEDED = SamplingParams(temperature=0.9, top_p=0.95, seed=11, max_tokens=40, ignore_eos=True)
PROMPTS = [some_tokens(count, seed=count) for count in (3, 16, 40, 31)]
CASES = ("eagle", "eagle-counting", "medusa-counting")


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("heads")
    found: dict[str, Path] = {}
    for kind, dim in (("plain", 8), ("fast", 16)):
        tiny = found[kind] = make_tiny_model(root / kind, head_dim=dim)
        counting = make_counting_model(root / f"{kind}-counting", head_dim=dim)
        found[f"{kind}-counting"] = counting
        found[f"{kind}-eagle"] = make_eagle_head(root / f"{kind}-eagle", tiny)
        found[f"{kind}-eagle-counting"] = make_counting_eagle(root / f"{kind}-e-c", counting)
        found[f"{kind}-medusa-counting"] = make_counting_medusa(root / f"{kind}-m-c", counting)
    return found


@pytest.fixture(scope="module")
def benches(folders: dict[str, Path]) -> dict[str, Bench]:
    """Torch in fp32, and the CPU's own decoder in bf16."""
    settings: dict[str, dict[str, Any]] = {"plain": {"dtype": "float32"}}
    if shutil.which("g++") is not None:
        settings["fast"] = {"deterministic": True}
    return {
        f"{kind}-{case}": Bench(
            folders[f"{kind}-counting" if case.endswith("counting") else kind],
            folders[f"{kind}-{case}"],
            drafter=case.partition("-")[0],
            **flags,
        )
        for kind, flags in settings.items()
        for case in CASES
    }


@pytest.fixture(params=[f"{kind}-{case}" for kind in ("plain", "fast") for case in CASES])
def bench(request: pytest.FixtureRequest, benches: dict[str, Bench]) -> Bench:
    if request.param not in benches:
        pytest.skip("no C++ compiler")
    return benches[request.param]


@pytest.mark.parametrize("name", SAMPLINGS)
def test_drafts_change_no_answer(bench: Bench, name: str) -> None:
    samplings = [replace(SAMPLINGS[name], seed=n) for n in range(len(PROMPTS))]
    expected = bench.run(PROMPTS, samplings)
    found = bench.run(PROMPTS, samplings, FixedLength(3))
    assert found.tokens == expected.tokens
    assert found.drafted > 0


@pytest.mark.parametrize("case", ["plain-medusa-counting", "fast-medusa-counting"])
def test_heads_that_know_are_believed(benches: dict[str, Bench], case: str) -> None:
    if case not in benches:
        pytest.skip("no C++ compiler")
    found = benches[case].run(PROMPTS, [GREEDY] * 4, FixedLength(3))
    assert found.accepted == found.drafted > 0
    # The first step has no draft, and each of the others brings four tokens.
    assert found.steps <= 14


@pytest.mark.parametrize("case", ["plain-eagle-counting", "fast-eagle-counting"])
def test_a_head_that_knows_one_token_is_right_about_it(
    benches: dict[str, Bench], case: str
) -> None:
    if case not in benches:
        pytest.skip("no C++ compiler")
    found = benches[case].run(PROMPTS, [GREEDY] * 4, FixedLength(1))
    assert found.accepted == found.drafted > 0
    assert found.steps <= 24
    longer = benches[case].run(PROMPTS, [GREEDY] * 4, FixedLength(2))
    assert 0 < longer.accepted == longer.drafted / 2


def test_heads_draw_with_the_same_noise_and_parameters(benches: dict[str, Bench]) -> None:
    """A bias leaves four tokens, and where it is that hot, noise alone chooses among them."""
    bench = benches["plain-eagle-counting"]
    bias = tuple((token, 1e5) for token in (5, 9, 11, 60))
    hot = replace(SEEDED, temperature=1e3, top_p=1.0, logit_bias=bias)
    samplings = [replace(hot, seed=n) for n in range(4)]
    expected = bench.run(PROMPTS, samplings)
    found = bench.run(PROMPTS, samplings, FixedLength(3))
    assert found.tokens == expected.tokens
    # By chance it would be less than a third.
    assert found.accepted > found.drafted * 0.8


@pytest.mark.parametrize("prompts", [True, False])
@pytest.mark.parametrize("depth", [1, 2])
def test_in_a_small_pool_with_two_plans_in_flight(bench: Bench, depth: int, prompts: bool) -> None:
    """Chunks, preemptions, prompts that share blocks, and the context's end."""
    asked = [*PROMPTS, PROMPTS[2] + [7, 8], some_tokens(60, 9)]
    samplings = [replace(SEEDED, seed=n, max_tokens=30 + n) for n in range(len(asked))]
    limits = {"blocks": 9, "chunk_tokens": 17, "context_length": 80}
    expected = bench.run(asked, samplings, context_length=80)
    found = bench.run(asked, samplings, FixedLength(3, prompts=prompts), depth=depth, **limits)
    assert found.tokens == expected.tokens


def test_a_sequence_with_much_missing_kv_is_not_drafted_for(
    benches: dict[str, Bench],
) -> None:
    """The features of its tokens are gone; of a few that counts for nothing."""
    bench = benches["plain-eagle"]
    for count, drafts in ((40, False), (16, True)):
        pool = BlockPool(64)
        prompt = some_tokens(count, 1)
        bench.run([prompt], [replace(GREEDY, max_tokens=20)], FixedLength(3), pool=pool)
        group = bench.built.cache.drafter
        assert group is not None
        group.filled.zero_()
        asked = [*prompt, 5, 6, *some_tokens(10, 7)]
        found = bench.run([asked], [GREEDY], FixedLength(3), pool=pool)
        assert (found.drafted > 0) == drafts


def test_choices_draft_over_shared_blocks(bench: Bench) -> None:
    samplings = [replace(SEEDED, seed=n) for n in range(len(PROMPTS))]
    expected = bench.run(PROMPTS, samplings, choices=3)
    found = bench.run(PROMPTS, samplings, FixedLength(3), choices=3)
    assert found.tokens == expected.tokens
    assert found.drafted > 0


def test_after_a_hit_in_the_prefix_cache(bench: Bench) -> None:
    pool = BlockPool(64)
    prompt = some_tokens(100, 3)
    bench.run([prompt], [GREEDY], FixedLength(3), pool=pool)
    asked = [*prompt, 5, 6]
    (expected,) = bench.run([asked], [GREEDY]).tokens
    found = bench.run([asked], [GREEDY], FixedLength(3), pool=pool)
    assert found.plans[0].rows[0].start == 96
    assert found.tokens == [expected]
    assert found.drafted > 0


def test_with_lengths_by_what_is_measured(bench: Bench) -> None:
    asked = [PROMPTS[0], PROMPTS[2]]
    samplings = [replace(GREEDY, max_tokens=100)] * 2
    expected = bench.run(asked, samplings)
    assert bench.run(asked, samplings, ModelDraftLength()).tokens == expected.tokens


def test_an_eagle_head_fills_full_blocks_even_if_it_never_drafts(benches: dict[str, Bench]) -> None:
    """Before they are published: full blocks may be sent or shared, and must not change."""
    bench = benches["plain-eagle"]
    found = bench.run([some_tokens(40, 1)], [replace(GREEDY, max_tokens=60)], FixedLength(0))
    assert found.drafted == 0
    group = bench.built.cache.drafter
    assert group is not None
    (sequence,) = found.sequences
    table = list(dict.fromkeys(b for plan in found.plans for b in plan.rows[0].block_table))
    full = (len(sequence.token_ids) - 1) // 16
    assert group.filled[table[:full]].tolist() == [16] * full


def test_engines_are_built_with_heads(folders: dict[str, Path]) -> None:
    settings = EngineSettings(
        folders["plain"], dtype="float32", device="cpu", threads=1, kv_pool_bytes=1 << 20
    )
    eagle = replace(settings, drafter="eagle", draft_model=folders["plain-eagle"])
    engine = build_engine(eagle)
    assert engine.runner.drafter == "eagle"
    assert engine.cache.geometry.drafter == GroupShape(1, 2, 8)
    warm_up(engine)
    medusa = replace(settings, drafter="medusa", draft_model=folders["plain-medusa-counting"])
    other = build_engine(medusa)
    assert other.runner.drafter == "medusa"
    assert other.cache.geometry.drafter is None
    warm_up(other)
    plain = build_engine(settings).fingerprint
    assert other.fingerprint == plain
    assert engine.fingerprint != plain


@pytest.mark.parametrize("drafter", ["eagle", "medusa"])
def test_heads_must_be_named_and_be_heads(folders: dict[str, Path], drafter: str) -> None:
    settings = EngineSettings(
        folders["plain"], dtype="float32", device="cpu", drafter=drafter, kv_pool_bytes=1 << 20
    )
    with pytest.raises(ConfigError, match=f"drafter {drafter} needs a draft_model"):
        build_engine(settings)
    with pytest.raises(ConfigError, match=r"not an EAGLE-3 head|not Medusa heads"):
        build_engine(replace(settings, draft_model=folders["plain"]))


def test_quantized_targets_have_quantized_heads(folders: dict[str, Path]) -> None:
    if shutil.which("g++") is None:
        pytest.skip("no C++ compiler")
    bench = Bench(folders["fast"], folders["fast-eagle"], drafter="eagle", quantization="int8")
    expected = bench.run(PROMPTS, [GREEDY] * 4)
    found = bench.run(PROMPTS, [GREEDY] * 4, FixedLength(3))
    assert found.tokens == expected.tokens
    assert found.drafted > 0


def test_vocabularies_end_before_the_targets(benches: dict[str, Bench]) -> None:
    """What a head cannot guess is never drafted."""
    bench = benches["plain-eagle"]
    found = bench.run(PROMPTS, [replace(SEEDED, seed=n) for n in range(4)], FixedLength(3))
    assert found.drafted > 0
    assert all(0 <= token <= EOS for tokens in found.tokens for token in tokens)
    torch.set_num_threads(1)
