"""Embeddings of a sequence: those of transformers, for every engine and in every batch."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F  # noqa: N812 - the field's name for it
from transformers import LlamaForCausalLM

from baton.request import SequenceSpec
from baton.sampling_params import SamplingParams
from engine.build import build_engine
from engine.cpu.decoder import CpuDecoder
from engine.engine import Engine, EngineSettings
from engine.offline import OfflineOutput, generate
from tests.support.drafter_heads import make_eagle_head
from tests.support.models import make_tiny_model

native = pytest.mark.skipif(shutil.which("g++") is None, reason="no C++ compiler")
DTYPES = [pytest.param("float32"), pytest.param("bfloat16", marks=native)]
TOLERANCE = {"float32": 2e-5, "bfloat16": 0.02}
ONCE = SamplingParams(temperature=0.0, max_tokens=1)
PROMPTS = [tuple((37 * n + 11 * seed) % 300 for n in range(9 + 30 * seed)) for seed in range(1, 4)]


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("embedded") / "model", head_dim=16)


def engine_of(model: Path, dtype: str = "float32", **changes: object) -> Engine:
    settings = EngineSettings(model, dtype, "cpu", 1, kv_pool_bytes=4 << 20, drafter="none")
    engine = build_engine(replace(settings, **changes))  # type: ignore[arg-type]
    assert isinstance(engine.runner.model, CpuDecoder) == (dtype == "bfloat16")
    return engine


def embedded(number: int, prompt: tuple[int, ...]) -> SequenceSpec:
    return SequenceSpec(f"e{number}", 0, "r", prompt, len(prompt), ONCE, embeds=True)


def spoken(number: int, prompt: tuple[int, ...]) -> SequenceSpec:
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    return SequenceSpec(f"s{number}", 0, "r", prompt, len(prompt), sampling)


def vectors(found: list[OfflineOutput]) -> torch.Tensor:
    return torch.tensor([output.embedding for output in found])


@torch.inference_mode()
def expected(model: Path) -> torch.Tensor:
    """fp32 [prompts, hidden_size] by transformers."""
    reference = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32)
    rows = []
    for prompt in PROMPTS:
        states = reference(torch.tensor([prompt]), output_hidden_states=True).hidden_states
        rows.append(F.normalize(states[-1][0, -1], dim=-1))
    return torch.stack(rows)


@pytest.mark.parametrize("dtype", DTYPES)
def test_they_are_those_of_transformers(model: Path, dtype: str) -> None:
    wanted = expected(model)
    assert (wanted @ wanted.T).fill_diagonal_(0).max() < 0.9, "alike, they would prove nothing"
    specs = [embedded(n, prompt) for n, prompt in enumerate(PROMPTS)]
    found = vectors(generate(engine_of(model, dtype), specs))
    torch.testing.assert_close(found, wanted, atol=TOLERANCE[dtype], rtol=0)
    torch.testing.assert_close(found.norm(dim=-1), torch.ones(len(PROMPTS)), atol=1e-6, rtol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_chunks_cached_prefixes_and_neighbours_change_nothing(model: Path, dtype: str) -> None:
    specs = [embedded(n, prompt) for n, prompt in enumerate(PROMPTS)]
    alone = vectors([generate(engine_of(model, dtype), [spec])[0] for spec in specs])
    engine = engine_of(model, dtype, chunk_tokens=7)
    mixed = [*specs, *(spoken(n, prompt) for n, prompt in enumerate(PROMPTS))]
    found = generate(engine, mixed)
    most = TOLERANCE[dtype]
    torch.testing.assert_close(vectors(found[: len(specs)]), alone, atol=most, rtol=0)
    assert [output.embedding for output in found[len(specs) :]] == [()] * len(PROMPTS)
    again = generate(engine, specs)
    torch.testing.assert_close(vectors(again), alone, atol=most, rtol=0)
    assert engine.pool.counts().cached > 0, "nothing was cached"


def test_others_answers_stay_what_they_are(model: Path) -> None:
    others = [spoken(n, prompt) for n, prompt in enumerate(PROMPTS)]
    engine = engine_of(model)
    before = [output.token_ids for output in generate(engine, others)]
    mixed = [embedded(9, PROMPTS[0]), *others]
    assert [output.token_ids for output in generate(engine_of(model), mixed)[1:]] == before


@native
def test_with_a_drafter_that_takes_hidden_states(model: Path, tmp_path: Path) -> None:
    head = make_eagle_head(tmp_path / "head", model)
    engine = engine_of(model, "bfloat16", drafter="eagle", draft_model=head)
    others = [spoken(n, prompt) for n, prompt in enumerate(PROMPTS)]
    mixed = [embedded(9, PROMPTS[1]), *others]
    found = generate(engine, mixed)
    wanted = expected(model)[1]
    torch.testing.assert_close(vectors(found[:1])[0], wanted, atol=0.02, rtol=0)
    alone = generate(engine_of(model, "bfloat16"), others)
    assert [o.token_ids for o in found[1:]] == [o.token_ids for o in alone]
