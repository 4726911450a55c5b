"""Sequences in blocks scattered over a cache, for tests of paged attention."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from engine.gpu.kernels.kv_blocks import KvBlocks, quantize
from tests.kernels.gpu.device import DEVICE

LAYERS = 2


@dataclass(frozen=True)
class Paged:
    """``cache`` lies on the CPU, for references; what kernels take is on the device."""

    cache: KvBlocks
    mappings: list[torch.Tensor]
    """Of each sequence, its slot mapping."""
    tables: torch.Tensor

    def on_device(self) -> KvBlocks:
        scales = self.cache.scales
        return KvBlocks(self.cache.data.to(DEVICE), None if scales is None else scales.to(DEVICE))


def paged(
    lengths: list[int], kv_heads: int, dim: int, block_size: int, dtype: torch.dtype
) -> Paged:
    """Sequences of random KV; what no sequence holds is NaN, or has scales that are."""
    counts = [-(-length // block_size) for length in lengths]
    blocks = sum(counts) + 2
    shape = (blocks, LAYERS, 2, kv_heads, block_size, dim)
    codes, scales = quantize(torch.randn(shape), dtype)
    free = iter(torch.randperm(blocks).tolist())
    tables = torch.full((len(lengths), max(1, *counts)), -1, dtype=torch.int32)
    mappings = []
    unused = torch.ones((blocks, block_size), dtype=torch.bool)
    for row, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        ids = torch.tensor([next(free) for _ in range(count)], dtype=torch.int64)
        tables[row, :count] = ids
        at = torch.arange(length)
        mappings.append(ids[at // block_size] * block_size + at % block_size)
        unused.view(-1)[mappings[-1]] = False
    hole = unused[:, None, None, None].expand(shape[:-1])
    if scales is None:
        codes[hole] = math.nan
    else:
        scales[hole] = math.nan
    return Paged(KvBlocks(codes, scales), mappings, tables.to(DEVICE))
