"""Reads quantized weights of checkpoints: GPTQ, AWQ, compressed-tensors, float8 and Baton's own.

The first three store integer codes with scales and zero points. Each reader takes the parts of one
module by their names.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from engine.quantization.weight import QuantizedWeight, QuantKind, pack_nibbles, unpack_nibbles


def unpack_words(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Unpack the codes in int32 [rows, words] to uint8 [rows, words * 32 / bits], the lowest bits
    first.

    ``bits`` is 4 or 8. A word's four bytes are in little-endian order on every machine that torch
    runs on.
    """
    codes = packed.contiguous().view(torch.uint8)
    return unpack_nibbles(codes) if bits == 4 else codes


def affine_weight(
    codes: torch.Tensor,
    bits: int,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    groups: torch.Tensor | None = None,
) -> QuantizedWeight:
    """Make a quantized weight whose values are ``(code - zero) * scale``.

    ``codes``: uint8 [out, in] of 0..2^bits-1, where ``bits`` is 4 or 8. ``scales``: floating [out,
    number of groups]. ``zeros``: integers of the same shape; None: 2^(bits-1) everywhere.
    ``groups``: integers [in], each input's group; None if groups are runs of inputs. Raises
    ValueError if the shapes do not fit.
    """
    inputs, number = codes.shape[1], scales.shape[1]
    if inputs % number:
        raise ValueError(f"{number} groups do not divide {inputs} inputs")
    codes, columns = _sorted(codes, groups, inputs // number)
    full = scales.float()
    middle = 1 << (bits - 1)
    offsets = torch.zeros_like(full) if zeros is None else full * (middle - zeros.float())
    if bits == 4:
        # Codes are unsigned, so the middle becomes part of the minimum.
        scales, mins = narrowed(full, offsets - full * middle)
        return QuantizedWeight(pack_nibbles(codes), "int4", scales, mins, inputs // number, columns)
    signed = codes ^ 128
    if not offsets.any():
        (scales,) = narrowed(full)
        return QuantizedWeight(signed, "int8", scales, None, inputs // number, columns)
    scales, mins = narrowed(full, offsets)
    return QuantizedWeight(signed, "int8", scales, mins, inputs // number, columns)


def _sorted(
    codes: torch.Tensor, groups: torch.Tensor | None, group: int
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Sort the columns (inputs) of ``codes`` so that the inputs of a group are adjacent. Returns
    the codes, and the order of the inputs; this order is None if the inputs are sorted already."""
    if groups is None:
        return codes, None
    plain = torch.arange(codes.shape[1], device=codes.device) // group
    if groups.shape != plain.shape:
        raise ValueError(f"{groups.numel()} group numbers for {plain.numel()} inputs")
    if torch.equal(groups.long(), plain):
        return codes, None
    columns = groups.long().argsort(stable=True)
    if not torch.equal(groups.long()[columns], plain):
        raise ValueError("its groups are not of equal size")
    return codes[:, columns], columns


def narrowed(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Convert all tensors to fp16 if this changes no value in any of them, and otherwise to fp32.
    The results are contiguous."""
    halves = tuple(tensor.half().contiguous() for tensor in tensors)
    full = tuple(tensor.float().contiguous() for tensor in tensors)
    exact = all(torch.equal(half.float(), one) for half, one in zip(halves, full, strict=True))
    return halves if exact else full


def read_gptq(parts: Mapping[str, torch.Tensor], bits: int, *, v2: bool) -> QuantizedWeight:
    """Read a weight in the layout of AutoGPTQ and its successor GPTQModel; ``bits`` is 4 or 8.

    Parts of a module: ``qweight`` int32 [in * bits / 32, out], packed along the inputs; ``qzeros``
    int32 [groups, out * bits / 32], packed along the outputs; ``scales`` floating [groups, out];
    ``g_idx`` int32 [in], each input's group (its use is called act-order in Frantar et al., 2022,
    arXiv:2210.17323).

    The format ``gptq`` stores each zero point minus one, ``gptq_v2`` (``v2``) stores it unchanged.
    The decoded zero point wraps at 2^bits, as in AutoGPTQ's kernels. Raises KeyError for a missing
    part, ValueError for one that does not fit.
    """
    codes = unpack_words(parts["qweight"].t(), bits)
    scales = parts["scales"].t()
    zeros = unpack_words(parts["qzeros"], bits).t()[: scales.shape[0]].int()
    if not v2:
        zeros = zeros + 1 & (1 << bits) - 1
    return affine_weight(codes, bits, scales, zeros, parts.get("g_idx"))


_AWQ_BITS = 4
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""For each of the eight outputs of a word in AWQ's layout, the nibble that holds it: the even
outputs come first."""


def read_awq(parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """Read a weight in AutoAWQ's ``gemm`` layout (Lin et al., 2023, arXiv:2306.00978).

    Parts of a module: ``qweight`` int32 [in, out / 8] and ``qzeros`` int32 [groups, out / 8], both
    packed along the outputs; ``scales`` floating [groups, out]. Raises KeyError for a missing part,
    ValueError for one that does not fit.
    """
    return affine_weight(
        _awq_outputs(parts["qweight"]).t(),
        _AWQ_BITS,
        parts["scales"].t(),
        _awq_outputs(parts["qzeros"]).t(),
    )


def _awq_outputs(packed: torch.Tensor) -> torch.Tensor:
    """Unpack AWQ's words, int32 [n, out / 8], to codes in the order of the outputs, uint8 [n,
    out]."""
    words = unpack_words(packed, _AWQ_BITS).view(packed.shape[0], -1, len(_AWQ_PLACES))
    return words[:, :, list(_AWQ_PLACES)].flatten(1)


def read_packed(parts: Mapping[str, torch.Tensor], bits: int) -> QuantizedWeight:
    """Read a weight of compressed-tensors (llm-compressor's format), ``pack-quantized``, 4 or 8
    bits.

    Parts: ``weight_packed`` int32 [out, in * bits / 32], ``weight_shape`` [2] the unpacked shape,
    ``weight_scale`` floating [out, groups]; optional are ``weight_zero_point`` int32 [out * bits /
    32, groups] and ``weight_g_idx`` int [in]. Codes and zero points are stored with 2^(bits-1)
    added. Raises KeyError for a missing part, ValueError for one that does not fit.
    """
    outputs, inputs = (int(size) for size in parts["weight_shape"])
    codes = unpack_words(parts["weight_packed"], bits)[:, :inputs]
    if codes.shape != (outputs, inputs):
        raise ValueError(f"its packed weight is {tuple(codes.shape)}, not {(outputs, inputs)}")
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = unpack_words(zeros.t(), bits).t()[:outputs]
    return affine_weight(codes, bits, parts["weight_scale"], zeros, parts.get("weight_g_idx"))


def read_int8(parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """Read a weight of compressed-tensors, ``int-quantized``, 8 bits.

    Parts: ``weight`` int8 [out, in], ``weight_scale``, and optionally ``weight_zero_point`` int8.
    Raises like ``read_packed``.
    """
    weight = parts["weight"]
    if weight.dtype != torch.int8:
        raise ValueError(f"its weight is {weight.dtype}, not int8")
    scales = _by_row(parts["weight_scale"], weight.shape[0])
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = _by_row(zeros.int(), weight.shape[0]).expand_as(scales) + 128
    return affine_weight(weight.view(torch.uint8) ^ 128, 8, scales, zeros)


def _by_row(values: torch.Tensor, rows: int) -> torch.Tensor:
    """Expand ``values`` to [out, groups]; they are one number, [out], or [out, groups] already."""
    return values.reshape(1, 1).expand(rows, 1) if values.numel() == 1 else values.view(rows, -1)


_MIN_GROUP = 16


def read_float8(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None
) -> QuantizedWeight:
    """Read an e4m3fn weight, ``code * scale``, with a scale per tensor, per row or per block.

    ``codes``: float8_e4m3fn [out, in]. ``scales``: floating. If ``block`` is None, they are one
    number, [out] or [out, 1]. Otherwise they are [out / block[0], in / block[1]], rounded up (the
    layout of DeepSeek-V3 and its successors, 128 x 128). Raises ValueError if they do not fit.
    """
    if codes.dtype != torch.float8_e4m3fn or codes.dim() != 2:
        raise ValueError(f"its weight is {codes.dtype} {tuple(codes.shape)}, not e4m3fn [out, in]")
    outputs, inputs = codes.shape
    group = inputs
    if block is None:
        if scales.numel() not in (1, outputs):
            raise ValueError(f"{tuple(scales.shape)} scales for {outputs} rows")
        full = scales.float().reshape(-1, 1).expand(outputs, 1)
    else:
        group = math.gcd(inputs, block[1])
        full = _spread(scales.float(), (outputs, inputs), block, group)
    return QuantizedWeight(codes.view(torch.uint8), "fp8", full.contiguous(), None, group)


def _spread(
    scales: torch.Tensor, shape: tuple[int, int], block: tuple[int, int], group: int
) -> torch.Tensor:
    """Expand the scales of blocks to one scale per row and ``group`` inputs; the last blocks may be
    incomplete."""
    expected = tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    if scales.shape != expected:
        raise ValueError(f"{tuple(scales.shape)} scales for {expected} blocks")
    if group < _MIN_GROUP:
        raise ValueError(f"rows of {shape[1]} in blocks of {block[1]} have groups of {group}")
    rows = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1] // group, dim=1)[:, : shape[1] // group]


NATIVE_METHOD = "baton"
NATIVE_CONFIG: dict[str, Any] = {"quant_method": NATIVE_METHOD, "version": 1}
"""The ``quantization_config`` in config.json of a checkpoint in Baton's own format."""

_TYPES: dict[QuantKind, torch.dtype] = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}
_KINDS = {dtype: kind for kind, dtype in _TYPES.items()}


def native_tensors(name: str, weight: QuantizedWeight) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors, with their names, that a checkpoint in Baton's own format has for the
    weight ``name``."""
    yield f"{name}.codes", weight.codes.view(_TYPES[weight.kind])
    yield f"{name}.scales", weight.scales
    if weight.mins is not None:
        yield f"{name}.mins", weight.mins
    if weight.columns is not None:
        yield f"{name}.columns", weight.columns


def read_native(parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """Read a weight of a checkpoint in Baton's own format. The tensors are used as they are, and
    may be mapped from the file.

    ``codes`` is [out, in], or [out, in / 2] for int4; its type determines the kind. ``scales`` is
    fp32 or fp16 [out, groups]. Optional are ``mins`` of the same shape and ``columns`` int64 [in].
    Raises KeyError or ValueError if they do not fit.
    """
    codes, scales = parts["codes"], parts["scales"]
    if codes.dtype not in _KINDS:
        raise ValueError(f"its codes are {codes.dtype}")
    kind = _KINDS[codes.dtype]
    inputs = codes.shape[-1] * (2 if kind == "int4" else 1)
    groups = max(1, scales.shape[-1])
    return QuantizedWeight(
        codes=codes.view(torch.uint8),
        kind=kind,
        scales=scales,
        mins=parts.get("mins"),
        group=inputs // groups,
        columns=parts.get("columns"),
    )
