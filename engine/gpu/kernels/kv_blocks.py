"""KV blocks in the form for GPU kernels: codes in one of several types, with or without scales."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

PLAIN, INT8, FP8, FP8_BITS = 0, 1, 2, 3
"""How a kernel reads KV: as floating-point numbers, as int8, as fp8 converted by the GPU, or as fp8
converted bit by bit."""

FP8_MAX = 448.0
INT8_MAX = 127.0

_HARDWARE_FP8 = 89
_KINDS = {
    torch.float32: PLAIN,
    torch.bfloat16: PLAIN,
    torch.float16: PLAIN,
    torch.int8: INT8,
    torch.float8_e4m3fn: FP8,
}


@dataclass(frozen=True, slots=True)
class KvBlocks:
    """KV blocks ``[block, layer, K/V, head, slot, dim]``, strided, with the last dimension
    contiguous.

    ``data`` is fp32, bf16, fp16, int8 or float8_e4m3fn. int8 and float8_e4m3fn have ``scales``,
    fp32 ``[block, layer, K/V, head, slot]``: a value is its code times the scale of its token and
    head. Raises ValueError if ``data`` and ``scales`` do not fit.
    """

    data: torch.Tensor
    scales: torch.Tensor | None = None

    def __post_init__(self) -> None:
        if self.data.dim() != 6 or self.data.shape[2] != 2:
            raise ValueError("KV blocks must be [block, layer, 2, head, slot, dim]")
        if self.data.dtype not in _KINDS:
            raise ValueError(f"KV blocks cannot be {self.data.dtype}")
        if self.data.stride(-1) != 1:
            raise ValueError("KV blocks must be contiguous in their last dimension")
        if (self.scales is not None) != self.quantized:
            raise ValueError("int8 and fp8 KV blocks must have scales, and others must not")
        if self.scales is not None and (
            self.scales.shape != self.data.shape[:-1] or self.scales.dtype != torch.float32
        ):
            raise ValueError("scales must be fp32 [block, layer, 2, head, slot]")

    @property
    def quantized(self) -> bool:
        return _KINDS[self.data.dtype] != PLAIN

    @property
    def heads(self) -> int:
        return self.data.shape[3]

    @property
    def block_size(self) -> int:
        """Number of slots in a block."""
        return self.data.shape[4]

    @property
    def dim(self) -> int:
        return self.data.shape[5]

    def kind(self, capability: int) -> int:
        """How a kernel reads these blocks on GPUs of compute capability ``capability``: ``PLAIN``,
        ``INT8``, ``FP8`` or ``FP8_BITS``."""
        kind = _KINDS[self.data.dtype]
        return FP8_BITS if kind == FP8 and capability < _HARDWARE_FP8 else kind

    def codes(self, kind: int) -> torch.Tensor:
        """View ``data`` in the type that a kernel of ``kind`` takes."""
        return self.data.view(torch.uint8) if kind == FP8_BITS else self.data

    def arguments(self, layer: int, kind: int) -> dict[str, torch.Tensor | int | None]:
        """Make a kernel's arguments for one layer of the blocks: ``data``, ``scales`` and their
        strides."""
        data = self.codes(kind)[:, layer]
        scales = None if self.scales is None else self.scales[:, layer]
        scale_strides = (0, 0, 0, 0) if scales is None else scales.stride()
        return {
            "data": data,
            "scales": scales,
            "stride_block": data.stride(0),
            "stride_value": data.stride(1),
            "stride_head": data.stride(2),
            "stride_slot": data.stride(3),
            "scale_block": scale_strides[0],
            "scale_value": scale_strides[1],
            "scale_head": scale_strides[2],
            "scale_slot": scale_strides[3],
        }


def empty_kv_blocks(
    shape: tuple[int, int, int, int, int, int], dtype: torch.dtype, device: torch.device
) -> KvBlocks:
    """Allocate uninitialized KV blocks ``[block, layer, 2, head, slot, dim]``, with scales if
    ``dtype`` is quantized."""
    quantized = _KINDS.get(dtype, PLAIN) != PLAIN
    return KvBlocks(
        torch.empty(shape, dtype=dtype, device=device),
        torch.empty(shape[:-1], dtype=torch.float32, device=device) if quantized else None,
    )


def dequantize(blocks: KvBlocks) -> torch.Tensor:
    """Compute the values of all blocks, in plain torch: fp32 ``[block, layer, 2, head, slot,
    dim]``."""
    values = blocks.data.float()
    return values if blocks.scales is None else values * blocks.scales[..., None]


def quantize(values: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Quantize ``values`` [..., dim] to ``dtype``; int8 and float8_e4m3fn get fp32 scales [...].

    This is the reference, in plain torch. The scale comes from the absolute maximum, and codes are
    rounded half to even.
    """
    if _KINDS[dtype] == PLAIN:
        return values.to(dtype), None
    values = values.float()
    most = values.abs().amax(dim=-1)
    scales = most / (INT8_MAX if dtype == torch.int8 else FP8_MAX)
    scales = torch.where(most > 0, scales, torch.ones_like(scales))
    scaled = values / scales[..., None]
    if dtype == torch.int8:
        return scaled.round().clamp(-INT8_MAX, INT8_MAX).to(torch.int8), scales
    return scaled.clamp(-FP8_MAX, FP8_MAX).to(dtype), scales


@triton.jit
def fp8_value(bits):  # type: ignore[no-untyped-def]
    """Convert the bits of e4m3fn, uint8, to fp32, exactly: as fp16 whose exponent is 8 too small.
    NaN is not supported."""
    wide = bits.to(tl.uint16)
    half = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
    return half.to(tl.float16, bitcast=True).to(tl.float32) * 256.0


@triton.jit
def fp8_bits(value):  # type: ignore[no-untyped-def]
    """Convert fp32 within +-448 to the bits of e4m3fn, uint8, rounded half to even, with the same
    result on every GPU."""
    bits = value.to(tl.uint32, bitcast=True)
    sign = (bits >> 24) & 0x80
    bits = bits & 0x7FFFFFFF
    # Subnormal results: adding 2^14 makes the sum's last mantissa bit worth 2^-9.
    shifted = bits.to(tl.float32, bitcast=True) + 16384.0
    small = shifted.to(tl.uint32, bitcast=True) - 0x46800000
    # Others: exponent bias 127 → 7, then rounding: add half of the cut-off part, minus one if even.
    odd = (bits >> 20) & 1
    large = (bits - 0x3C000000 + 0x7FFFF + odd) >> 20
    return (tl.where(bits < 0x3C800000, small, large) | sign).to(tl.uint8)


@triton.jit
def round_half_even(value):  # type: ignore[no-untyped-def]
    """Round an fp32 number of a magnitude up to 2^22 to the nearest integer, half to even, in
    fp32."""
    return (value + 12582912.0) - 12582912.0


@triton.jit  # type: ignore[untyped-decorator]
def as_number(codes, kind: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert loaded KV codes to ``dtype``, without their scale; exact for codes in bf16 and
    fp16."""
    numbers = fp8_value(codes) if kind == 3 else codes
    return numbers.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def scale_of(most, kind: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the fp32 scales of rows from their absolute maxima ``most``, as ``quantize`` does."""
    limit = 127.0 if kind == 1 else 448.0
    return tl.where(most > 0, tl.div_rn(most, tl.full(most.shape, limit, tl.float32)), 1.0)


@triton.jit  # type: ignore[untyped-decorator]
def encode(x, scale, kind: tl.constexpr, element: tl.constexpr):  # type: ignore[no-untyped-def]
    """Quantize fp32 numbers [rows, some] with their rows' scales, or convert them to ``element`` if
    the kind has no scales."""
    if kind == 0:
        codes = x.to(element)
    else:
        scaled = tl.div_rn(x, tl.broadcast_to(scale[:, None], x.shape))
        if kind == 1:
            codes = round_half_even(scaled).to(tl.int8)
        else:
            # The quotient may exceed 448 by a rounding error.
            codes = fp8_bits(tl.minimum(tl.maximum(scaled, -448.0), 448.0))
    return codes
