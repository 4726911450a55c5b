"""A rank reads its part of each tensor: plain, fused, of experts, quantized."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from baton.errors import ConfigError
from engine.checkpoint.model_config import load_model_config
from engine.model.weights import Weight, load_weights
from engine.parallel.shard import ModelShard, shard_of
from engine.parallel.weight_slices import WeightSlices
from engine.quantization.formats import NATIVE_CONFIG, native_tensors
from engine.quantization.weight import QuantizedWeight, dequantize, quantize
from tests.support.models import make_tiny_fp8, make_tiny_model, make_tiny_moe

CPU = torch.device("cpu")
Q, K, V = (f"model.layers.0.self_attn.{kind}_proj.weight" for kind in "qkv")
OUTPUT = "model.layers.0.self_attn.o_proj.weight"
DOWN = "model.layers.0.mlp.down_proj.weight"


def part(
    folder: Path, rank: int, ranks: int, quantization: str = "auto"
) -> tuple[dict[str, Weight], ModelShard]:
    config = load_model_config(folder)
    shard = shard_of(config, rank, ranks)
    slices = WeightSlices(config, shard)
    return load_weights(folder, CPU, torch.float32, quantization, slices), shard


def plain(weight: Weight) -> torch.Tensor:
    return dequantize(weight) if isinstance(weight, QuantizedWeight) else weight


@pytest.mark.parametrize("quantization", ["auto", "int8"])
def test_the_parts_make_up_the_whole(tmp_path: Path, quantization: str) -> None:
    make_tiny_model(tmp_path, head_dim=32)
    whole = load_weights(tmp_path, CPU, torch.float32, quantization)
    parts = [part(tmp_path, rank, 2, quantization)[0] for rank in range(2)]
    for name, weight in whole.items():
        found = [plain(one[name]) for one in parts]
        if found[0].shape == weight.shape:
            assert "norm" in name
            assert torch.equal(found[0], plain(weight))
            continue
        dim = 1 if name in (OUTPUT, DOWN) or "o_proj" in name or "down_proj" in name else 0
        assert torch.equal(torch.cat(found, dim=dim), plain(weight))
        assert all(one.is_contiguous() for one in found)


def test_fused_projections_are_cut_piece_by_piece(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    expected = [part(tmp_path, rank, 2)[0] for rank in range(2)]
    for base in ("model.layers.0", "model.layers.1"):
        fused = [weights.pop(f"{base}.self_attn.{kind}_proj.weight") for kind in "qkv"]
        weights[f"{base}.self_attn.qkv_proj.weight"] = torch.cat(fused)
        both = [weights.pop(f"{base}.mlp.{kind}_proj.weight") for kind in ("gate", "up")]
        weights[f"{base}.mlp.gate_up_proj.weight"] = torch.cat(both)
    save_file(weights, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config |= {"architectures": ["Phi3ForCausalLM"], "head_dim": 8, "sliding_window": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for rank in range(2):
        found, _ = part(tmp_path, rank, 2)
        names = [f"model.layers.1.self_attn.{kind}_proj.weight" for kind in "qkv"]
        together = torch.cat([plain(expected[rank][name]) for name in names])
        assert torch.equal(plain(found["model.layers.1.self_attn.qkv_proj.weight"]), together)
        names = [f"model.layers.1.mlp.{kind}_proj.weight" for kind in ("gate", "up")]
        together = torch.cat([plain(expected[rank][name]) for name in names])
        assert torch.equal(plain(found["model.layers.1.mlp.gate_up_proj.weight"]), together)


def test_experts_are_whole_and_each_on_one_rank(tmp_path: Path) -> None:
    make_tiny_moe(tmp_path, experts=5)
    whole = load_weights(tmp_path, CPU, torch.float32)
    parts = [part(tmp_path, rank, 3)[0] for rank in range(3)]
    names = [name for name in whole if ".experts." in name]
    assert names
    for name in names:
        (held,) = [found for found in parts if name in found]
        assert torch.equal(plain(held[name]), plain(whole[name]))
    assert all("model.layers.0.block_sparse_moe.gate.weight" in found for found in parts)


def test_the_bias_of_what_is_added_up_is_rank_0s(tmp_path: Path) -> None:
    make_tiny_model(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    bias = OUTPUT.replace("weight", "bias")
    weights[bias] = torch.randn(48)
    weights[Q.replace("weight", "bias")] = torch.arange(48.0)
    save_file(weights, tmp_path / "model.safetensors")
    first, second = (part(tmp_path, rank, 2)[0] for rank in range(2))
    assert torch.equal(plain(first[bias]), weights[bias])
    assert bias not in second
    assert plain(second[Q.replace("weight", "bias")]).tolist() == list(range(24, 48))


def test_batons_own_quantized_weights_are_cut(tmp_path: Path) -> None:
    # Inputs of 192: the output projection is cut between groups of 32 where heads are so wide.
    make_tiny_model(tmp_path, head_dim=32)
    weights = load_file(tmp_path / "model.safetensors")
    stored: dict[str, torch.Tensor] = {}
    for name, weight in weights.items():
        if name.endswith(("_proj.weight", "lm_head.weight")):
            stored |= native_tensors(name, quantize(weight, "int4"))
        else:
            stored[name] = weight
    save_file(stored, tmp_path / "model.safetensors")
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"] = NATIVE_CONFIG
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = load_weights(tmp_path, CPU, torch.float32)
    parts = [part(tmp_path, rank, 2)[0] for rank in range(2)]
    for name, dim in ((Q, 0), (OUTPUT, 1), (DOWN, 1), ("lm_head.weight", 0)):
        held = [found[name] for found in parts]
        assert all(isinstance(one, QuantizedWeight) for one in held)
        together = torch.cat([plain(one) for one in held], dim=dim)
        assert torch.equal(together, plain(whole[name]))
    with pytest.raises(ConfigError, match=r"cannot be divided for tp 4.*use another tp"):
        part(tmp_path, 0, 4)


@pytest.mark.parametrize("scale_per_row", [True, False])
@pytest.mark.parametrize("ranks", [2, 3])
def test_fp8_weights_with_a_scale_per_row_or_tensor_are_cut(
    tmp_path: Path, ranks: int, scale_per_row: bool
) -> None:
    make_tiny_fp8(tmp_path, scale_per_row=scale_per_row)
    whole = load_weights(tmp_path, CPU, torch.float32)
    parts = [part(tmp_path, rank, ranks)[0] for rank in range(ranks)]
    for name, dim in ((OUTPUT, 1), (DOWN, 1)):
        held = [found[name] for found in parts]
        assert all(isinstance(one, QuantizedWeight) and one.kind == "fp8" for one in held)
        together = torch.cat([plain(one) for one in held], dim=dim)
        assert torch.equal(together, plain(whole[name]))


def test_columns_in_an_order_of_their_own_cannot_be_cut_by_inputs() -> None:
    weight = quantize(torch.randn(4, 64), "int8")
    ordered = QuantizedWeight(
        weight.codes, "int8", weight.scales, None, weight.group, torch.randperm(64)
    )
    with pytest.raises(ValueError, match="not in the order"):
        ordered.inputs(range(32))
