"""Writes small quantized checkpoints by their formats' descriptions, one integer at a time.

Each maker returns the tensors of one module and the matrix [out, in] that they stand for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

Parts = dict[str, torch.Tensor]
Ints = npt.NDArray[np.int64]


def randoms(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def some_scales(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.uniform(0.001, 0.01, shape)).half()


def pack(numbers: Ints, bits: int, axis: int, order: tuple[int, ...] | None = None) -> torch.Tensor:
    """int32 words of 32 / bits numbers along ``axis``; number ``order[i]`` of a word at place i."""
    per_word = 32 // bits
    order = order or tuple(range(per_word))
    numbers = np.moveaxis(numbers, axis, -1)
    width = -(-numbers.shape[-1] // per_word)
    words = np.zeros((*numbers.shape[:-1], width), dtype=np.uint32)
    for word in range(width):
        for place, offset in enumerate(order):
            index = word * per_word + offset
            if index < numbers.shape[-1]:
                words[..., word] |= numbers[..., index].astype(np.uint32) << np.uint32(place * bits)
    return torch.from_numpy(np.moveaxis(words, -1, axis).astype(np.int32).copy())


def matrix(codes: Ints, zeros: Ints, scales: torch.Tensor, groups: Ints) -> torch.Tensor:
    """(code - zero) * scale of codes [out, in], zeros and scales [out, groups]."""
    whole = torch.from_numpy(codes - zeros[:, groups]).double()
    return (whole * scales.double()[:, torch.from_numpy(groups)]).float()


def gptq(
    inputs: int = 64,
    outputs: int = 24,
    group: int = 16,
    bits: int = 4,
    *,
    symmetric: bool = False,
    act_order: bool = False,
    v2: bool = False,
) -> tuple[Parts, torch.Tensor]:
    rng = randoms()
    levels, number = 1 << bits, inputs // group
    codes = rng.integers(0, levels, (outputs, inputs))
    zeros = rng.integers(1, levels, (outputs, number))
    if symmetric:
        zeros[:] = levels // 2
    scales = some_scales(rng, outputs, number)
    groups = np.arange(inputs) // group
    if act_order:
        groups = rng.permutation(groups)
    parts = {
        "qweight": pack(codes.T, bits, 0),
        "qzeros": pack(zeros.T - (0 if v2 else 1), bits, 1),
        "scales": scales.t().contiguous(),
        "g_idx": torch.from_numpy(groups).int(),
    }
    return parts, matrix(codes, zeros, scales, groups)


def awq(inputs: int = 64, outputs: int = 24, group: int = 32) -> tuple[Parts, torch.Tensor]:
    rng = randoms()
    codes = rng.integers(0, 16, (outputs, inputs))
    zeros = rng.integers(0, 16, (outputs, inputs // group))
    scales = some_scales(rng, outputs, inputs // group)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    parts = {
        "qweight": pack(codes.T, 4, 1, order),
        "qzeros": pack(zeros.T, 4, 1, order),
        "scales": scales.t().contiguous(),
    }
    return parts, matrix(codes, zeros, scales, np.arange(inputs) // group)


def float8(
    inputs: int = 64,
    outputs: int = 24,
    block: tuple[int, int] | None = None,
    *,
    whole: bool = False,
) -> tuple[Parts, torch.Tensor]:
    rng = randoms()
    weight = torch.from_numpy(rng.normal(size=(outputs, inputs))).to(torch.float8_e4m3fn)
    if block is None:
        scale = some_scales(rng, 1) if whole else some_scales(rng, outputs, 1)
        return {"weight": weight, "weight_scale": scale.float()}, weight.float() * scale.float()
    rows, columns = (-(-size // part) for size, part in zip((outputs, inputs), block, strict=True))
    scale = some_scales(rng, rows, columns).float()
    values = torch.empty(outputs, inputs)
    for i in range(outputs):
        for j in range(inputs):
            values[i, j] = weight[i, j].float() * scale[i // block[0], j // block[1]]
    return {"weight": weight, "weight_scale_inv": scale}, values


def compressed(
    inputs: int = 64,
    outputs: int = 20,
    group: int = 32,
    bits: int = 4,
    *,
    symmetric: bool = True,
    act_order: bool = False,
) -> tuple[Parts, torch.Tensor]:
    """pack-quantized: signed codes and zero points, stored with 2^(bits-1) added."""
    rng = randoms()
    half, number = 1 << (bits - 1), inputs // group
    codes = rng.integers(-half, half, (outputs, inputs))
    zeros = rng.integers(-half, half, (outputs, number))
    scales = some_scales(rng, outputs, number)
    groups = np.arange(inputs) // group
    if act_order:
        groups = rng.permutation(groups)
    parts = {
        "weight_packed": pack(codes + half, bits, 1),
        "weight_shape": torch.tensor([outputs, inputs]),
        "weight_scale": scales,
    }
    if act_order:
        parts["weight_g_idx"] = torch.from_numpy(groups).int()
    if symmetric:
        zeros[:] = 0
    else:
        parts["weight_zero_point"] = pack(zeros + half, bits, 0)
    return parts, matrix(codes, zeros, scales, groups)


def int_quantized(
    inputs: int = 64, outputs: int = 20, *, symmetric: bool = True, whole: bool = False
) -> tuple[Parts, torch.Tensor]:
    rng = randoms()
    codes = rng.integers(-128, 128, (outputs, inputs))
    shape = (1,) if whole else (outputs, 1)
    zeros = np.zeros(shape, dtype=np.int64) if symmetric else rng.integers(-99, 99, shape)
    scale = some_scales(rng, *shape)
    parts = {"weight": torch.from_numpy(codes).to(torch.int8), "weight_scale": scale}
    if not symmetric:
        parts["weight_zero_point"] = torch.from_numpy(zeros).to(torch.int8)
    return parts, torch.from_numpy(codes - zeros).float() * scale.float()


def write(folder: Path, config: dict[str, Any] | None, *modules: tuple[str, Parts]) -> Path:
    """A folder with these modules' tensors and ``quantization_config``."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"{name}.{part}": value for name, parts in modules for part, value in parts.items()}
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()},
        folder / "model.safetensors",
    )
    whole = {} if config is None else {"quantization_config": config}
    (folder / "config.json").write_text(json.dumps(whole))
    return folder


def compressed_config(layout: str, **weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
