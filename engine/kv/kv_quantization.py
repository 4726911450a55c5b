"""KV in 8 bits: codes, and one fp32 scale for each token and KV head of keys and of values.

``int8`` puts a head's largest magnitude at 127, ``fp8`` (e4m3fn; OCP 8-bit Floating Point
Specification 1.0) at 448. A scale per token and head needs no calibration, is known when the token
is written, and keeps a token or a head with outliers from costing the others their digits. It is 4
bytes beside ``head_dim`` codes.
"""

from __future__ import annotations

import torch

from baton.errors import ConfigError

KV_DTYPES: dict[str, torch.dtype] = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""What ``--kv-dtype`` may name beside ``auto``."""
PLAIN_KV_DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
"""What a pool may name beside them: values without scales, rounded when they are written."""
_LARGEST: dict[torch.dtype, float] = {torch.int8: 127.0, torch.float8_e4m3fn: 448.0}


def kv_dtype(name: str, model: torch.dtype) -> torch.dtype:
    """The type of the cache's codes; ``auto`` is the model's type. Raises ConfigError."""
    if name == "auto":
        return model
    known = KV_DTYPES | PLAIN_KV_DTYPES
    if name not in known:
        raise ConfigError(f"kv_dtype {name!r} is unknown; known: auto, {', '.join(known)}")
    return known[name]


def kv_dtype_name(dtype: torch.dtype) -> str:
    """``int8`` or ``fp8``, or torch's name of a plain type: what a Geometry says."""
    named = (name for name, known in KV_DTYPES.items() if known == dtype)
    return next(named, str(dtype).removeprefix("torch."))


def has_scales(dtype: torch.dtype) -> bool:
    """Whether a cache of this type holds codes with scales."""
    return dtype in _LARGEST


def quantize_kv(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of ``dtype`` [..., dim] and fp32 scales [...] of ``values`` [..., dim].

    Rounded half to even. The definition for every kernel: it divides, in fp32, where another might
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
    """fp32 [..., dim] of codes [..., dim] and scales [...]."""
    return codes.float() * scales.unsqueeze(-1)
