"""Rotary tables and rotation against those of ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from engine.checkpoint.model_config import load_model_config
from engine.checkpoint.rope_spec import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    RopeScaling,
    RopeSpec,
)
from engine.model.rope import apply_rope, rope_table

CPU = torch.device("cpu")
CONTEXT = 4096


def reference(dim: int, theta: float, rope: dict[str, Any]) -> LlamaRotaryEmbedding:
    return LlamaRotaryEmbedding(
        LlamaConfig(
            hidden_size=2 * dim,
            num_attention_heads=2,
            head_dim=dim,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_theta": theta, **rope},
        )
    )


LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 1024,
}
CASES = [
    pytest.param(None, {"rope_type": "default"}, id="default"),
    pytest.param(LinearScaling(3.0), {"rope_type": "linear", "factor": 3.0}, id="linear"),
    pytest.param(Llama3Scaling(8.0, 1.0, 4.0, 1024), LLAMA3, id="llama3"),
    pytest.param(
        Llama3Scaling(32.0, 2.0, 8.0, 512),
        LLAMA3
        | {
            "factor": 32.0,
            "low_freq_factor": 2.0,
            "high_freq_factor": 8.0,
            "original_max_position_embeddings": 512,
        },
        id="llama3, other factors",
    ),
]


@pytest.mark.parametrize("theta", [10_000.0, 500_000.0])
@pytest.mark.parametrize("dim", [8, 64, 128])
@pytest.mark.parametrize(("scaling", "rope"), CASES)
def test_the_table_is_that_of_transformers(
    dim: int, theta: float, scaling: RopeScaling | None, rope: dict[str, Any]
) -> None:
    cos, sin = reference(dim, theta, rope)(torch.zeros(1), torch.arange(CONTEXT)[None])
    table = rope_table(RopeSpec(theta, dim, scaling), CONTEXT, CPU)
    assert table.shape == (CONTEXT, 2, dim // 2)
    assert table.dtype == torch.float32
    # Angles reach thousands of radians, where 32-bit numbers are 2⁻¹² apart.
    torch.testing.assert_close(table[:, 0], cos[0, :, : dim // 2], atol=5e-4, rtol=0)
    torch.testing.assert_close(table[:, 1], sin[0, :, : dim // 2], atol=5e-4, rtol=0)
    torch.testing.assert_close(table[:64, 0], cos[0, :64, : dim // 2], atol=1e-5, rtol=0)


@pytest.mark.parametrize("factor", [2.0, 3.5])
def test_a_dynamic_table_is_that_of_transformers_at_the_end_of_the_context(factor: float) -> None:
    context = int(factor * CONTEXT)
    rope = {"rope_type": "dynamic", "factor": factor}
    cos, sin = reference(64, 10_000.0, rope)(torch.zeros(1), torch.arange(context)[None])
    table = rope_table(RopeSpec(10_000.0, 64, DynamicScaling(factor)), context, CPU)
    torch.testing.assert_close(table[:, 0], cos[0, :, :32], atol=1e-3, rtol=0)
    torch.testing.assert_close(table[:, 1], sin[0, :, :32], atol=1e-3, rtol=0)


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0 + n / 20 for n in range(16)],
    "long_factor": [1.0 + n for n in range(16)],
    "original_max_position_embeddings": 1024,
}
LONGER: dict[str, dict[str, Any]] = {
    "yarn": YARN,
    "yarn with another blend": YARN | {"beta_fast": 8.0, "beta_slow": 2.0},
    "yarn between dimensions": YARN | {"truncate": False},
    "yarn with magnitudes": YARN | {"mscale": 0.8, "mscale_all_dim": 0.5},
    "yarn with an attention factor": YARN | {"attention_factor": 1.3},
    "yarn of a part": YARN | {"partial_rotary_factor": 0.5},
    "longrope": LONGROPE,
    "longrope within its context": LONGROPE | {"original_max_position_embeddings": CONTEXT},
    "longrope with a factor": LONGROPE | {"factor": 32.0},
    "longrope with an attention factor": LONGROPE | {"attention_factor": 0.9},
    "llama3 of a part": LLAMA3 | {"partial_rotary_factor": 0.25},
}


@pytest.mark.parametrize("name", LONGER)
@pytest.mark.filterwarnings("ignore")
def test_a_config_makes_the_table_of_transformers(tmp_path: Path, name: str) -> None:
    rope = {"rope_theta": 10_000.0, **LONGER[name]}
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        hidden_size=64,
        num_attention_heads=2,
        max_position_embeddings=CONTEXT,
        rope_parameters=rope,
    )
    config.save_pretrained(tmp_path)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), torch.arange(CONTEXT)[None])
    (spec,) = load_model_config(tmp_path).ropes
    table = rope_table(spec, CONTEXT, CPU)
    half = cos.shape[-1] // 2
    assert table.shape == (CONTEXT, 2, half)
    torch.testing.assert_close(table[:, 0], cos[0, :, :half], atol=5e-4, rtol=0)
    torch.testing.assert_close(table[:, 1], sin[0, :, :half], atol=5e-4, rtol=0)


def test_what_is_not_rotated_stays() -> None:
    torch.manual_seed(2)
    x = torch.randn(5, 2, 16)
    table = rope_table(RopeSpec(10_000.0, 12, None), 5, CPU)
    found = apply_rope(x, table)
    assert torch.equal(found[..., 12:], x[..., 12:])
    torch.testing.assert_close(found[..., :12], apply_rope(x[..., :12], table))
    assert (found[1:, :, :12] != x[1:, :, :12]).any()


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between() -> None:
    plain = rope_table(RopeSpec(500_000.0, 128, None), CONTEXT, CPU)
    scaling = Llama3Scaling(8.0, 1.0, 4.0, 1024)
    stretched = rope_table(RopeSpec(500_000.0, 128, scaling), CONTEXT, CPU)
    ratio = torch.atan2(stretched[1, 1], stretched[1, 0]) / torch.atan2(plain[1, 1], plain[1, 0])
    assert ratio[0].item() == pytest.approx(1.0, abs=1e-4)
    assert ratio[-1].item() == pytest.approx(1 / 8, abs=1e-4)
    assert ((ratio > 0.2) & (ratio < 0.9)).any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rotation_is_that_of_transformers(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    positions = torch.tensor([0, 1, 5, 900, 3, 3])
    x = torch.randn(len(positions), 3, 16).to(dtype)
    cos, sin = reference(16, 10_000.0, {"rope_type": "default"})(torch.zeros(1), positions[None])
    batched = x.float().transpose(0, 1)[None]
    expected = apply_rotary_pos_emb(batched, batched, cos, sin)[0][0].transpose(0, 1)
    found = apply_rope(x, rope_table(RopeSpec(10_000.0, 16, None), CONTEXT, CPU)[positions])
    assert found.dtype == dtype
    torch.testing.assert_close(
        found.float(), expected, atol=1e-4 if dtype == torch.float32 else 2e-2, rtol=1e-2
    )


def test_products_depend_on_the_distance_alone() -> None:
    torch.manual_seed(1)
    table = rope_table(RopeSpec(10_000.0, 32, None), CONTEXT, CPU)
    query, key = torch.randn(1, 1, 32), torch.randn(1, 1, 32)

    def product(at: int, to: int) -> float:
        rotated = apply_rope(query, table[at : at + 1]) * apply_rope(key, table[to : to + 1])
        return float(rotated.sum())

    assert product(17, 5) == pytest.approx(product(112, 100), abs=1e-4)
    assert product(17, 5) != pytest.approx(product(5, 17), abs=1e-4)
    assert product(0, 0) == pytest.approx(float((query * key).sum()), abs=1e-5)
