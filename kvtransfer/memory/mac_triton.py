"""The digests of ``kvtransfer.memory.mac`` in Triton: GPU blocks stay on the GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from kvtransfer.memory.checksum_triton import current_device, words_of
from kvtransfer.memory.mac import BLOCK_PAIRS, STREAMS, BatchKey, blocks_of


@triton.jit  # type: ignore[untyped-decorator]
def digest_kernel(  # type: ignore[no-untyped-def]
    words, digests, keys, total, pairs: tl.constexpr, streams: tl.constexpr
):
    """Compute the digests of one block of a segment in each program.

    ``words`` int32 [total] and ``keys`` int32 [2, pairs + streams - 1] → ``digests`` int64
    [blocks, streams]. A whole block has ``2 * pairs`` words.
    """
    program = tl.program_id(0)
    start = program * 2 * pairs
    half = tl.minimum(pairs, (total - start) // 2)
    index = tl.arange(0, pairs)
    inside = index < half
    left = tl.load(words + start + index, mask=inside, other=0).to(tl.uint32)
    right = tl.load(words + start + half + index, mask=inside, other=0).to(tl.uint32)
    for stream in tl.static_range(streams):
        first = left + tl.load(keys + stream + index).to(tl.uint32)
        second = right + tl.load(keys + pairs + streams - 1 + stream + index).to(tl.uint32)
        product = tl.where(inside, first.to(tl.uint64) * second.to(tl.uint64), 0)
        tl.store(digests + program * streams + stream, tl.sum(product.to(tl.int64), axis=0))


def mac_tensors(parts: Sequence[torch.Tensor], key: BatchKey) -> tuple[int, ...]:
    """Compute the MACs of consecutive segments: contiguous uint8 tensors of one size, which is a
    multiple of 8 bytes, on one device. Their addresses must be multiples of 4.

    The result equals that of ``kvtransfer.memory.copying.mac_of``. Raises ValueError for other
    tensors.
    """
    if not parts:
        return ()
    length, device = parts[0].numel(), parts[0].device
    if any(part.numel() != length for part in parts):
        raise ValueError("all parts must have one size")
    words = [words_of(part) for part in parts]
    keys = torch.from_numpy(key.words.view("i4")).to(device)
    blocks = blocks_of(length)
    digests = torch.empty((len(parts), blocks, STREAMS), dtype=torch.int64, device=device)
    with current_device(device):
        for each, out in zip(words, digests, strict=True):
            if blocks:
                digest_kernel[(blocks,)](
                    each, out, keys, length // 4, pairs=BLOCK_PAIRS, streams=STREAMS
                )
        return key.tags(digests.cpu().numpy().view("u8"), length)
