"""Quantized checkpoints read as weights, against integers packed by the formats' descriptions."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from baton.errors import ConfigError
from engine.model.weights import load_weights
from engine.quantization.formats import NATIVE_CONFIG, native_tensors
from engine.quantization.weight import KINDS, QuantizedWeight, QuantKind, dequantize, quantize
from tests.support.engine import checkpoints
from tests.support.engine.checkpoints import Parts, compressed_config, write

CPU = torch.device("cpu")
NAME = "model.layers.0.mlp.up_proj"
NORM = ("model.norm", {"weight": torch.ones(8)})


def load(folder: Path, config: dict[str, Any] | None, parts: Parts) -> QuantizedWeight:
    """The one quantized weight of a checkpoint that has a plain one too."""
    weights = load_weights(write(folder, config, (NAME, parts), NORM), CPU, torch.bfloat16)
    assert weights.keys() == {f"{NAME}.weight", "model.norm.weight"}
    norm, weight = weights["model.norm.weight"], weights[f"{NAME}.weight"]
    assert isinstance(norm, torch.Tensor)
    assert norm.dtype == torch.bfloat16
    assert isinstance(weight, QuantizedWeight)
    return weight


def check(weight: QuantizedWeight, expected: torch.Tensor) -> None:
    """Equal except for the rounding of fp32."""
    assert weight.shape == expected.shape
    torch.testing.assert_close(dequantize(weight), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
@pytest.mark.parametrize("v2", [True, False])
def test_gptq(tmp_path: Path, bits: int, symmetric: bool, act_order: bool, v2: bool) -> None:
    parts, expected = checkpoints.gptq(bits=bits, symmetric=symmetric, act_order=act_order, v2=v2)
    config = {
        "quant_method": "gptq",
        "bits": bits,
        "group_size": 16,
        "sym": symmetric,
        "desc_act": act_order,
    }
    if v2:
        config["checkpoint_format"] = "gptq_v2"
    weight = load(tmp_path, config, parts)
    check(weight, expected)
    assert weight.kind == f"int{bits}"
    assert weight.group == 16
    assert (weight.columns is not None) == act_order
    if symmetric:
        assert weight.scales.dtype == torch.float16
        assert (weight.mins is None) == (bits == 8)


def test_gptq_with_one_group_a_row(tmp_path: Path) -> None:
    parts, expected = checkpoints.gptq(group=64)
    del parts["g_idx"]
    config = {"quant_method": "gptq", "bits": 4, "group_size": -1}
    weight = load(tmp_path, config, parts)
    check(weight, expected)
    assert weight.group == 64


def test_awq(tmp_path: Path) -> None:
    parts, expected = checkpoints.awq()
    weight = load(
        tmp_path, {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, parts
    )
    check(weight, expected)
    assert (weight.kind, weight.group, weight.columns) == ("int4", 32, None)


def test_fp8_in_blocks(tmp_path: Path) -> None:
    """The last block of a row and of a column is cut short."""
    parts, expected = checkpoints.float8(inputs=80, outputs=24, block=(16, 32))
    config = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [16, 32]}
    weight = load(tmp_path, config, parts)
    check(weight, expected)
    assert (weight.kind, weight.group) == ("fp8", 16)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize(
    "config",
    [
        {"quant_method": "fp8", "activation_scheme": "static"},
        {"quant_method": "fbgemm_fp8"},
        compressed_config("float-quantized", num_bits=8, type="float", strategy="channel"),
    ],
)
def test_fp8_by_rows_and_whole(tmp_path: Path, whole: bool, config: dict[str, Any]) -> None:
    parts, expected = checkpoints.float8(whole=whole)
    parts["input_scale"] = torch.ones(1)
    weight = load(tmp_path, config, parts)
    check(weight, expected)
    assert weight.group == 64


def test_compressed_fp8_in_blocks(tmp_path: Path) -> None:
    parts, expected = checkpoints.float8(inputs=64, outputs=32, block=(16, 32))
    parts["weight_scale"] = parts.pop("weight_scale_inv")
    config = compressed_config(
        "float-quantized", num_bits=8, type="float", strategy="block", block_structure=[16, 32]
    )
    check(load(tmp_path, config, parts), expected)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("act_order", [True, False])
def test_compressed_integers(tmp_path: Path, bits: int, symmetric: bool, act_order: bool) -> None:
    parts, expected = checkpoints.compressed(bits=bits, symmetric=symmetric, act_order=act_order)
    config = compressed_config("pack-quantized", num_bits=bits, type="int", strategy="group")
    weight = load(tmp_path, config, parts)
    check(weight, expected)
    assert (weight.kind, weight.group) == (f"int{bits}", 32)


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("whole", [True, False])
def test_compressed_int8(tmp_path: Path, symmetric: bool, whole: bool) -> None:
    parts, expected = checkpoints.int_quantized(symmetric=symmetric, whole=whole)
    config = compressed_config("int-quantized", num_bits=8, type="int")
    weight = load(tmp_path, config, parts)
    check(weight, expected)
    assert (weight.mins is None) == symmetric


@pytest.mark.parametrize("kind", KINDS)
def test_batons_own(tmp_path: Path, kind: QuantKind) -> None:
    made = quantize(torch.randn(24, 64, generator=torch.Generator().manual_seed(0)), kind)
    parts = dict(native_tensors("weight", made))
    weight = load(tmp_path, NATIVE_CONFIG, parts)
    assert weight.kind == kind
    assert torch.equal(dequantize(weight), dequantize(made))


def test_batons_own_in_another_order(tmp_path: Path) -> None:
    parts, expected = checkpoints.gptq(act_order=True)
    made = load(tmp_path / "gptq", {"quant_method": "gptq", "bits": 4}, parts)
    check(load(tmp_path / "own", NATIVE_CONFIG, dict(native_tensors("weight", made))), expected)


def test_parts_may_lie_in_several_files(tmp_path: Path) -> None:
    parts, expected = checkpoints.float8(inputs=64, outputs=32, block=(16, 32))
    config = {"quant_method": "fp8", "weight_block_size": [16, 32]}
    write(tmp_path, config, (NAME, {"weight": parts["weight"]}), NORM)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00001.safetensors")
    write(tmp_path, config, (NAME, {"weight_scale_inv": parts["weight_scale_inv"]}))
    (tmp_path / "model.safetensors").rename(tmp_path / "model-00002.safetensors")
    weight = load_weights(tmp_path, CPU, torch.bfloat16)[f"{NAME}.weight"]
    assert isinstance(weight, QuantizedWeight)
    check(weight, expected)


REFUSED: dict[str, dict[str, Any]] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "None": {"bits": 4},
    "bits 3": {"quant_method": "gptq", "bits": 3},
    "checkpoint_format marlin": {"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"},
    "format marlin": {"quant_method": "gptq", "bits": 4, "format": "marlin"},
    "is_marlin_format": {"quant_method": "gptq", "bits": 4, "is_marlin_format": True},
    "bits 8 for": {"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 8}}},
    "version gemv": {"quant_method": "awq", "bits": 4, "version": "gemv"},
    "fmt e5m2": {"quant_method": "fp8", "fmt": "e5m2"},
    "weight_block_size must": {"quant_method": "fp8", "weight_block_size": 128},
    "format marlin-24": compressed_config("marlin-24", num_bits=4),
    "num_bits 3": compressed_config("pack-quantized", num_bits=3),
    "type int": compressed_config("float-quantized", num_bits=8, type="int"),
    "config_groups must": {"quant_method": "compressed-tensors", "format": "int-quantized"},
    "transform_config": {
        **compressed_config("pack-quantized", num_bits=4),
        "transform_config": {"config_groups": {"R1": {}}},
    },
    "sparsity_config": {
        **compressed_config("pack-quantized", num_bits=4),
        "sparsity_config": {"format": "sparse-24-bitmask"},
    },
    "version 2": {"quant_method": "baton", "version": 2},
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_not_served_is_named(tmp_path: Path, message: str) -> None:
    write(tmp_path, REFUSED[message], NORM)
    with pytest.raises(ConfigError, match=message):
        load_weights(tmp_path, CPU, torch.bfloat16)


def test_mixed_schemes_are_refused(tmp_path: Path) -> None:
    config = compressed_config("pack-quantized", num_bits=4)
    config["config_groups"]["group_1"] = {"weights": {"num_bits": 8}}
    write(tmp_path, config, NORM)
    with pytest.raises(ConfigError, match="2 kinds"):
        load_weights(tmp_path, CPU, torch.bfloat16)


GPTQ = {"quant_method": "gptq", "bits": 4}


def test_parts_that_are_missing_or_do_not_fit(tmp_path: Path) -> None:
    parts, _ = checkpoints.gptq()
    for name in ("qzeros", "scales"):
        lacking = {part: value for part, value in parts.items() if part != name}
        write(tmp_path, GPTQ, (NAME, lacking))
        with pytest.raises(ConfigError, match=f"{NAME} has no {name}"):
            load_weights(tmp_path, CPU, torch.bfloat16)
    uneven = parts["g_idx"].clone()
    uneven[0] = 3
    for wrong in (
        {"g_idx": uneven},
        {"g_idx": parts["g_idx"][:-1]},
        {"scales": parts["scales"][:3]},
        {"qzeros": parts["qzeros"][:2]},
    ):
        write(tmp_path, GPTQ, (NAME, parts | wrong))
        with pytest.raises(ConfigError, match=f"{NAME} cannot be read"):
            load_weights(tmp_path, CPU, torch.bfloat16)


def test_fp8_without_scales_is_refused(tmp_path: Path) -> None:
    parts, _ = checkpoints.float8()
    write(tmp_path, {"quant_method": "fp8"}, (NAME, {"weight": parts["weight"]}))
    with pytest.raises(ConfigError, match="no scale"):
        load_weights(tmp_path, CPU, torch.bfloat16)


def test_a_config_that_cannot_be_read(tmp_path: Path) -> None:
    for text in ("{", "[]", '{"quantization_config": 3}'):
        write(tmp_path, None, NORM)
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(ConfigError, match=r"config\.json"):
            load_weights(tmp_path, CPU, torch.bfloat16)
