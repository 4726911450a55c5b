"""Float8 checkpoints: e4m3fn weights with a scale per tensor, per row or per block of both."""

from __future__ import annotations

import math

import torch

from engine.quantization.weight import QuantizedWeight

_MIN_GROUP = 16


def read_float8(
    codes: torch.Tensor, scales: torch.Tensor, block: tuple[int, int] | None
) -> QuantizedWeight:
    """The weight ``code * scale``.

    ``codes``: float8_e4m3fn [out, in]. ``scales``: floating, with ``block`` None one number, or
    [out] or [out, 1]; else [out / block[0], in / block[1]], rounded up (DeepSeek-V3's layout, 128 x
    128, and its descendants'). Raises ValueError where they do not fit.
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
    """One scale per row and ``group`` inputs: the last blocks may be cut short."""
    expected = tuple(-(-size // part) for size, part in zip(shape, block, strict=True))
    if scales.shape != expected:
        raise ValueError(f"{tuple(scales.shape)} scales for {expected} blocks")
    if group < _MIN_GROUP:
        raise ValueError(f"rows of {shape[1]} in blocks of {block[1]} have groups of {group}")
    rows = scales.repeat_interleave(block[0], dim=0)[: shape[0]]
    return rows.repeat_interleave(block[1] // group, dim=1)[:, : shape[1] // group]
