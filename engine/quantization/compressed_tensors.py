"""Integer weights of the compressed-tensors library (llm-compressor's format).

``pack-quantized``: ``weight_packed`` int32 [out, in * bits / 32], ``weight_shape`` [2] the unpacked
shape, ``weight_scale`` floating [out, groups], and perhaps ``weight_zero_point`` int32
[out * bits / 32, groups] and ``weight_g_idx`` int [in]. Codes and zero points are stored with
2^(bits-1) added. ``int-quantized``: ``weight`` int8 [out, in] with ``weight_scale`` and perhaps
``weight_zero_point`` int8.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from engine.quantization.affine import affine_weight, unpack_words
from engine.quantization.weight import QuantizedWeight


def read_packed(parts: Mapping[str, torch.Tensor], bits: int) -> QuantizedWeight:
    """``pack-quantized`` of 4 or 8 bits; ``parts`` by the names above.

    Raises KeyError for a missing part, ValueError for one that does not fit.
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
    """``int-quantized`` of 8 bits; ``parts`` by the names above. It raises as ``read_packed``."""
    weight = parts["weight"]
    if weight.dtype != torch.int8:
        raise ValueError(f"its weight is {weight.dtype}, not int8")
    scales = _by_row(parts["weight_scale"], weight.shape[0])
    zeros = parts.get("weight_zero_point")
    if zeros is not None:
        zeros = _by_row(zeros.int(), weight.shape[0]).expand_as(scales) + 128
    return affine_weight(weight.view(torch.uint8) ^ 128, 8, scales, zeros)


def _by_row(values: torch.Tensor, rows: int) -> torch.Tensor:
    """One number, [out] or [out, groups] → [out, groups]."""
    return values.reshape(1, 1).expand(rows, 1) if values.numel() == 1 else values.view(rows, -1)
