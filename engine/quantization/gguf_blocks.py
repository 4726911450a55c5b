"""Converts GGUF's quantized blocks to codes, scales and minimums, without dequantizing the weights.

Layouts: ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml. Codes are the file's
own, reordered. Scales stay fp16 as in the file. The products of a K-quant's scales and its
sub-scales are rounded to fp16, which changes them by at most 2^-11 of their value. That moves a
weight by about 1/60 of a quantization step. In fp32, these products would make a 4-bit weight a
fifth larger, and a weight is read for every token. A product of a subnormal scale is exact, because
it is a multiple of the smallest one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from engine.quantization.weight import QuantizedWeight, QuantKind, concat_rows, pack_nibbles

_PIECE_VALUES = 1 << 22
"""Maximum number of weights that are unpacked at a time, which bounds the memory use."""


@dataclass(frozen=True, slots=True)
class _Unpacked:
    """``n`` unpacked GGUF blocks: integer codes [n, values], fp32 scales and mins [n, groups]."""

    codes: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """The layout of one GGUF quantization type, and how its blocks are unpacked."""

    kind: QuantKind
    values: int
    """Number of weights in a block."""
    size: int
    """Number of bytes of a block."""
    group: int
    unpack: Callable[[torch.Tensor], _Unpacked]
    """Unpacks blocks, uint8 [n, size]."""


def read_blocks(raw: torch.Tensor, type_name: str) -> QuantizedWeight:
    """Convert GGUF blocks, uint8 [out, bytes of a row], to a quantized weight [out, in].
    ``type_name`` is a key of ``BLOCK_FORMATS``.

    Types with 4 bits become ``int4``, with the same nibbles; 5- and 6-bit codes become ``int8``
    codes of the same value. Raises ValueError if a row does not consist of whole blocks, KeyError
    for an unknown type.
    """
    layout = BLOCK_FORMATS[type_name]
    if raw.shape[1] % layout.size:
        raise ValueError(f"rows of {raw.shape[1]} bytes are not whole blocks of {layout.size}")
    inputs = raw.shape[1] // layout.size * layout.values
    step = max(1, _PIECE_VALUES // inputs)
    return concat_rows([_read(part, layout) for part in torch.split(raw, step)])


def _read(raw: torch.Tensor, layout: BlockFormat) -> QuantizedWeight:
    rows = raw.shape[0]
    blocks = layout.unpack(raw.contiguous().view(-1, layout.size))
    codes = blocks.codes.reshape(rows, -1)
    codes = pack_nibbles(codes) if layout.kind == "int4" else codes.view(torch.uint8)
    scales = blocks.scales.reshape(rows, -1)
    mins = None if blocks.mins is None else blocks.mins.reshape(rows, -1)
    halves = (scales.half(), None if mins is None else mins.half())
    if all(half is None or bool(torch.isfinite(half).all()) for half in halves):
        scales, mins = halves
    return QuantizedWeight(codes, layout.kind, scales, mins, layout.group)


def _floats(raw: torch.Tensor) -> torch.Tensor:
    """View bytes uint8 [n, 2 k] as fp16, and convert them to fp32 [n, k]."""
    return raw.contiguous().view(torch.float16).float()


def _halves(raw: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [n, k] to nibbles [n, 2 k]: the low nibbles of all bytes, then the high ones."""
    return torch.cat((raw & 15, raw >> 4), dim=-1)


def _bits(raw: torch.Tensor) -> torch.Tensor:
    """Unpack bytes [n, k] to bits [n, 8 k] of 0 and 1: column i is bit i of the row as a
    little-endian number."""
    return (raw.unsqueeze(-1) >> _steps(8, 1, raw) & 1).flatten(1)


def _steps(count: int, step: int, like: torch.Tensor) -> torch.Tensor:
    return torch.arange(0, count * step, step, dtype=torch.uint8, device=like.device)


def _q4_0(raw: torch.Tensor) -> _Unpacked:
    scale = _floats(raw[:, :2])
    return _Unpacked(_halves(raw[:, 2:]), scale, -8 * scale)


def _q4_1(raw: torch.Tensor) -> _Unpacked:
    return _Unpacked(_halves(raw[:, 4:]), _floats(raw[:, :2]), _floats(raw[:, 2:4]))


def _q5_0(raw: torch.Tensor) -> _Unpacked:
    codes = _halves(raw[:, 6:]) | _bits(raw[:, 2:6]) << 4
    return _Unpacked(codes.view(torch.int8) - 16, _floats(raw[:, :2]))


def _q5_1(raw: torch.Tensor) -> _Unpacked:
    codes = _halves(raw[:, 8:]) | _bits(raw[:, 4:8]) << 4
    return _Unpacked(codes, _floats(raw[:, :2]), _floats(raw[:, 2:4]))


def _q8_0(raw: torch.Tensor) -> _Unpacked:
    return _Unpacked(raw[:, 2:].contiguous(), _floats(raw[:, :2]))


def _k_scales(raw: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Unpack the scales and minimums [n, 8] of Q4_K and Q5_K blocks.

    The input has two fp16 numbers, and then eight scales and eight minimums of 6 bits in twelve
    bytes. The upper two bits of the last four scales and minimums are the upper bits of the first
    eight bytes.
    """
    scale, least = _floats(raw[:, :2]), _floats(raw[:, 2:4])
    low, high, rest = raw[:, 4:8], raw[:, 8:12], raw[:, 12:16]
    scales = torch.cat((low & 63, rest & 15 | low >> 6 << 4), dim=-1)
    mins = torch.cat((high & 63, rest >> 4 | high >> 6 << 4), dim=-1)
    return scale * scales.float(), -least * mins.float()


def _nibble_rows(raw: torch.Tensor, width: int) -> torch.Tensor:
    """Unpack bytes [n, k] to nibbles [n, 2 k / width, width].

    Each ``width`` bytes give a row of their low nibbles, then a row of their high ones.
    """
    return _halves(raw.reshape(len(raw), -1, width)).reshape(len(raw), -1, width)


def _q4_k(raw: torch.Tensor) -> _Unpacked:
    return _Unpacked(_nibble_rows(raw[:, 16:], 32).flatten(1), *_k_scales(raw))


def _q5_k(raw: torch.Tensor) -> _Unpacked:
    high = raw[:, None, 16:48] >> _steps(8, 1, raw)[:, None] & 1
    codes = _nibble_rows(raw[:, 48:], 32) | high << 4
    return _Unpacked(codes.flatten(1), *_k_scales(raw))


def _q6_k(raw: torch.Tensor) -> _Unpacked:
    low = _nibble_rows(raw[:, :128], 64).reshape(len(raw), 8, 32)
    high = raw[:, 128:192].reshape(len(raw), 2, 1, 32) >> _steps(4, 2, raw)[:, None] & 3
    codes = (low | high.reshape(len(raw), 8, 32) << 4).view(torch.int8) - 32
    subscales = raw[:, 192:208].contiguous().view(torch.int8).float()
    return _Unpacked(codes.flatten(1), _floats(raw[:, 208:]) * subscales)


BLOCK_FORMATS = {
    "Q4_0": BlockFormat("int4", 32, 18, 32, _q4_0),
    "Q4_1": BlockFormat("int4", 32, 20, 32, _q4_1),
    "Q5_0": BlockFormat("int8", 32, 22, 32, _q5_0),
    "Q5_1": BlockFormat("int8", 32, 24, 32, _q5_1),
    "Q8_0": BlockFormat("int8", 32, 34, 32, _q8_0),
    "Q4_K": BlockFormat("int4", 256, 144, 32, _q4_k),
    "Q5_K": BlockFormat("int8", 256, 176, 32, _q5_k),
    "Q6_K": BlockFormat("int8", 256, 210, 16, _q6_k),
}
"""Supported GGUF types by name. Files named Q4_K_M and Q5_K_M mix Q4_K or Q5_K with Q6_K."""
