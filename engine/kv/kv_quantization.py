"""Quantizes KV to 8-bit codes, with one fp32 scale for each token and KV head of keys and of
values.

``int8`` maps a head's largest magnitude to 127, ``fp8`` (e4m3fn; OCP 8-bit Floating Point
Specification 1.0) to 448. A scale per token and head needs no calibration and is known when the
token is written. Outliers of one token or head do not reduce the precision of others. A scale takes
4 bytes for each ``head_dim`` codes.
"""

from __future__ import annotations

import torch

from baton.errors import ConfigError

KV_DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""Quantized KV types that the option ``--kv-dtype`` accepts, in addition to ``auto``."""
PLAIN_KV_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""KV types without scales that a pool's configuration also accepts; values are rounded when they
are written."""
_LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def kv_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """Return the torch type of keys and values in the cache. For ``auto``, it is the model's type.
    Raises ConfigError."""
    if name == "auto":
        return model
    known = KV_DTYPES | PLAIN_KV_DTYPES
    if name not in known:
        raise ConfigError(f"kv_dtype {name!r} is unknown; known: auto, {', '.join(known)}")
    return known[name]


def kv_dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a KV type in a ``Geometry``: ``int8`` or ``fp8``, or torch's name of a
    plain type."""
    named = (name for name, known in KV_DTYPES.items() if known == dtype)
    return next(named, str(dtype).removeprefix("torch."))


def has_scales(dtype: torch.dtype) -> bool:
    """Whether a cache of this type holds quantized codes with scales."""
    return dtype in _LARGEST


def quantize_kv(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize ``values`` [..., dim] to codes of ``dtype`` [..., dim] and fp32 scales [...].

    Rounds half to even. This is the reference for every kernel: it divides, in fp32, and does not
    multiply by the inverse.
    """
    values = values.float()
    largest = _LARGEST[dtype]
    most = values.abs().amax(dim=-1)
    scales = most / largest
    scales = torch.where(scales > 0, scales, 1.0)
    scaled = values / scales.unsqueeze(-1)
    if dtype == torch.int8:
        scaled = scaled.round()
    return scaled.clamp(-largest, largest).to(dtype), scales


def dequantize_kv(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Dequantize codes [..., dim] with scales [...] to fp32 [..., dim]."""
    return codes.float() * scales.unsqueeze(-1)
