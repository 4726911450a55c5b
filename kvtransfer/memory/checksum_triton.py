"""The checksum of ``kvtransfer.memory.checksum`` in Triton: GPU blocks stay on the GPU.

A kernel computes it alone, or in the pass that copies, also from another GPU's memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
import triton
import triton.language as tl

from kvtransfer.memory.checksum import KEY_SEED, LENGTH_FACTOR

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
    """Sum the checksum's products for int32 words ``left`` and ``right`` [block]. Returns an
    int64."""
    number = (2 * index).to(tl.uint32)
    left = left.to(tl.uint32) + _mix32(number ^ seed)
    right = right.to(tl.uint32) + _mix32((number + 1) ^ seed)
    product = tl.where(inside, left.to(tl.uint64) * right.to(tl.uint64), 0)
    return tl.sum(product.to(tl.int64), axis=0)


@triton.jit  # type: ignore[untyped-decorator]
def checksum_kernel(  # type: ignore[no-untyped-def]
    words, sums, pairs, seed: tl.constexpr, block: tl.constexpr
):
    """Compute partial sums: ``words`` int32 [2 * pairs] → ``sums`` int64 [ceil(pairs / block)]."""
    program = tl.program_id(0)
    index = program * block + tl.arange(0, block)
    inside = index < pairs
    left = tl.load(words + index, mask=inside, other=0)
    right = tl.load(words + pairs + index, mask=inside, other=0)
    tl.store(sums + program, _sum_of_products(left, right, index, inside, seed))


@triton.jit(do_not_specialize=["target", "source"])  # type: ignore[untyped-decorator]
def copy_kernel(  # type: ignore[no-untyped-def]
    target, source, sums, pairs, seed: tl.constexpr, block: tl.constexpr
):
    """Copy words from address ``source`` to address ``target``, and compute the same sums as
    ``checksum_kernel``.

    The addresses are integers, because torch has no tensors for memory of a GPU that this process
    does not see. They are not specialized: every copy uses the same kernel, whose accesses are 16
    bytes wide.
    """
    to = tl.multiple_of(target.to(tl.pointer_type(tl.int32)), 16)
    words = tl.multiple_of(source.to(tl.pointer_type(tl.int32)), 16)
    program = tl.program_id(0)
    index = program * block + tl.arange(0, block)
    inside = index < pairs
    left = tl.load(words + index, mask=inside, other=0)
    right = tl.load(words + pairs + index, mask=inside, other=0)
    tl.store(to + index, left, mask=inside)
    tl.store(to + pairs + index, right, mask=inside)
    tl.store(sums + program, _sum_of_products(left, right, index, inside, seed))


def checksum_tensor(data: torch.Tensor) -> int:
    """Compute the checksum of a contiguous uint8 tensor. Its size must be a multiple of 8 bytes,
    and its address a multiple of 4.

    The result equals ``kvtransfer.memory.checksum.checksum`` of the same bytes. Raises ValueError
    for other tensors.
    """
    words = words_of(data)
    pairs = words.numel() // 2
    sums = _sums(pairs, data.device)
    with current_device(data.device):
        checksum_kernel[(sums.numel(),)](words, sums, pairs, seed=KEY_SEED, block=BLOCK)
        return _checksum(sums, data.numel())


def can_copy_words(target: int, source: int, size: int) -> bool:
    """Whether ``copy_words`` supports a copy. Both addresses must be multiples of 16, and ``size``
    must be a multiple of 8."""
    return not ((target | source) % 16 or size % 8)


def copy_words(target: int, source: int, size: int, device: torch.device) -> int:
    """Copy ``size`` bytes from one address to another; the two ranges must not overlap.

    A kernel copies on the current stream of ``device``, which must be able to access both
    addresses. Returns the checksum of the written bytes; all of them have arrived then. Raises
    ValueError if ``can_copy_words`` is false.
    """
    if not can_copy_words(target, source, size):
        raise ValueError(
            f"{size} bytes from {source:#x} to {target:#x} are not whole aligned words"
        )
    pairs = size // 8
    sums = _sums(pairs, device)
    with current_device(device):
        copy_kernel[(sums.numel(),)](target, source, sums, pairs, seed=KEY_SEED, block=BLOCK)
        return _checksum(sums, size)


def words_of(data: torch.Tensor) -> torch.Tensor:
    """Return the int32 words of a contiguous uint8 tensor. Raises ValueError for other tensors."""
    if data.dtype != torch.uint8 or not data.is_contiguous() or data.numel() % 8:
        raise ValueError("the tensor must be contiguous uint8 of a multiple of 8 bytes")
    if data.storage_offset() % 4:
        raise ValueError("the tensor must begin at a multiple of 4 bytes")
    return data.view(-1).view(torch.int32)


def current_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one within this context, because Triton launches kernels on the
    current device."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _sums(pairs: int, device: torch.device) -> torch.Tensor:
    return torch.empty(triton.cdiv(pairs, BLOCK), dtype=torch.int64, device=device)


def _checksum(sums: torch.Tensor, size: int) -> int:
    return (int(sums.sum()) + size * LENGTH_FACTOR) & _MASK64
