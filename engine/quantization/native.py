"""Baton's own checkpoints: a weight's parts under its name, ready to be mapped.

``<weight>.codes`` [out, in], or [out, in / 2] for int4, of the type that tells the kind;
``<weight>.scales`` fp32 or fp16 [out, groups]; perhaps ``<weight>.mins`` of the same shape and
``<weight>.columns`` int64 [in].
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from engine.quantization.weight import QuantizedWeight, QuantKind

METHOD = "baton"
CONFIG: dict[str, Any] = {"quant_method": METHOD, "version": 1}
"""``quantization_config`` of such a checkpoint."""

_TYPES: dict[QuantKind, torch.dtype] = {
    "int8": torch.int8,
    "int4": torch.uint8,
    "fp8": torch.float8_e4m3fn,
}
_KINDS = {dtype: kind for kind, dtype in _TYPES.items()}


def native_tensors(name: str, weight: QuantizedWeight) -> Iterator[tuple[str, torch.Tensor]]:
    """What a checkpoint holds of the weight ``name``."""
    yield f"{name}.codes", weight.codes.view(_TYPES[weight.kind])
    yield f"{name}.scales", weight.scales
    if weight.mins is not None:
        yield f"{name}.mins", weight.mins
    if weight.columns is not None:
        yield f"{name}.columns", weight.columns


def read_native(parts: Mapping[str, torch.Tensor]) -> QuantizedWeight:
    """``parts``: ``codes``, ``scales``, ... Raises KeyError or ValueError where they do not fit."""
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
