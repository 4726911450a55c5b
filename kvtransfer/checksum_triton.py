"""The checksum of ``kvtransfer.checksum`` as a Triton kernel: GPU blocks stay on the GPU."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kvtransfer.checksum import KEY_SEED, LENGTH_FACTOR

_MASK64 = (1 << 64) - 1
BLOCK = 1024


@triton.jit
def _mix32(x):  # type: ignore[no-untyped-def]
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit  # type: ignore[untyped-decorator]
def checksum_kernel(  # type: ignore[no-untyped-def]
    words, sums, pairs, seed: tl.constexpr, block: tl.constexpr
):
    """Partial sums: ``words`` int32 [2 * pairs] → ``sums`` int64 [ceil(pairs / block)]."""
    program = tl.program_id(0)
    index = program * block + tl.arange(0, block)
    inside = index < pairs
    left = tl.load(words + index, mask=inside, other=0).to(tl.uint32)
    right = tl.load(words + pairs + index, mask=inside, other=0).to(tl.uint32)
    number = (2 * index).to(tl.uint32)
    left = left + _mix32(number ^ seed)
    right = right + _mix32((number + 1) ^ seed)
    product = left.to(tl.uint64) * right.to(tl.uint64)
    product = tl.where(inside, product, 0)
    tl.store(sums + program, tl.sum(product.to(tl.int64), axis=0))


def checksum_tensor(data: torch.Tensor) -> int:
    """The checksum of a contiguous uint8 tensor of a multiple of 8 bytes, aligned to 4.

    Equal to ``kvtransfer.checksum.checksum`` of the same bytes. Raises ValueError otherwise.
    """
    if data.dtype != torch.uint8 or not data.is_contiguous() or data.numel() % 8:
        raise ValueError("a contiguous uint8 tensor of a multiple of 8 bytes is needed")
    if data.storage_offset() % 4:
        raise ValueError("the tensor must begin at a multiple of 4 bytes")
    words = data.view(-1).view(torch.int32)
    pairs = words.numel() // 2
    programs = triton.cdiv(pairs, BLOCK)
    sums = torch.empty(programs, dtype=torch.int64, device=data.device)
    checksum_kernel[(programs,)](words, sums, pairs, seed=KEY_SEED, block=BLOCK)
    return (int(sums.sum()) + data.numel() * LENGTH_FACTOR) & _MASK64
