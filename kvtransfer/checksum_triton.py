"""The checksum of ``kvtransfer.checksum`` in Triton: GPU blocks stay on the GPU.

Alone, or in the pass that copies, also between two GPUs that reach each other's memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

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
def _sum_of_products(left, right, index, inside, seed: tl.constexpr):  # type: ignore[no-untyped-def]
    """The pairs' part of the checksum, int64: words ``left`` and ``right`` int32 [block]."""
    number = (2 * index).to(tl.uint32)
    left = left.to(tl.uint32) + _mix32(number ^ seed)
    right = right.to(tl.uint32) + _mix32((number + 1) ^ seed)
    product = tl.where(inside, left.to(tl.uint64) * right.to(tl.uint64), 0)
    return tl.sum(product.to(tl.int64), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def checksum_kernel(  # type: ignore[no-untyped-def]
    words, sums, pairs, seed: tl.constexpr, block: tl.constexpr
):
    """Partial sums: ``words`` int32 [2 * pairs] → ``sums`` int64 [ceil(pairs / block)]."""
    program = tl.program_id(0)
    index = program * block + tl.arange(0, block)
    inside = index < pairs
    left = tl.load(words + index, mask=inside, other=0)
    right = tl.load(words + pairs + index, mask=inside, other=0)
    tl.store(sums + program, _sum_of_products(left, right, index, inside, seed))


@triton.jit  # type: ignore[untyped-decorator]
def copy_kernel(  # type: ignore[no-untyped-def]
    to, words, sums, pairs, seed: tl.constexpr, block: tl.constexpr
):
    """``checksum_kernel`` of ``words`` int32 [2 * pairs], which it also stores in ``to``."""
    program = tl.program_id(0)
    index = program * block + tl.arange(0, block)
    inside = index < pairs
    left = tl.load(words + index, mask=inside, other=0)
    right = tl.load(words + pairs + index, mask=inside, other=0)
    tl.store(to + index, left, mask=inside)
    tl.store(to + pairs + index, right, mask=inside)
    tl.store(sums + program, _sum_of_products(left, right, index, inside, seed))


def checksum_tensor(data: torch.Tensor) -> int:
    """The checksum of a contiguous uint8 tensor of a multiple of 8 bytes, aligned to 4.

    Equal to ``kvtransfer.checksum.checksum`` of the same bytes. Raises ValueError otherwise.
    """
    words = _words(data)
    pairs = words.numel() // 2
    sums = _sums(pairs, data.device)
    with _current(data.device):
        checksum_kernel[(sums.numel(),)](words, sums, pairs, seed=KEY_SEED, block=BLOCK)
        return _checksum(sums, data)


def copy_tensor(to: torch.Tensor, source: torch.Tensor) -> int:
    """Copy a tensor as ``checksum_tensor`` takes it into another; the two do not overlap.

    Computed on the device of ``to``, which must reach ``source``'s memory, on its current stream.
    Returns the checksum of what was written, which then has arrived. Raises ValueError for other
    tensors, and where the two differ in length.
    """
    target, words = _words(to), _words(source)
    if target.numel() != words.numel():
        raise ValueError(f"{source.numel()} bytes do not go into {to.numel()}")
    pairs = words.numel() // 2
    sums = _sums(pairs, to.device)
    with _current(to.device):
        copy_kernel[(sums.numel(),)](target, words, sums, pairs, seed=KEY_SEED, block=BLOCK)
        return _checksum(sums, source)


def _words(data: torch.Tensor) -> torch.Tensor:
    if data.dtype != torch.uint8 or not data.is_contiguous() or data.numel() % 8:
        raise ValueError("a contiguous uint8 tensor of a multiple of 8 bytes is needed")
    if data.storage_offset() % 4:
        raise ValueError("the tensor must begin at a multiple of 4 bytes")
    return data.view(-1).view(torch.int32)


def _current(device: torch.device) -> AbstractContextManager[object]:
    """Triton launches on the current device, whatever the tensors are on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _sums(pairs: int, device: torch.device) -> torch.Tensor:
    return torch.empty(triton.cdiv(pairs, BLOCK), dtype=torch.int64, device=device)


def _checksum(sums: torch.Tensor, data: torch.Tensor) -> int:
    return (int(sums.sum()) + data.numel() * LENGTH_FACTOR) & _MASK64
