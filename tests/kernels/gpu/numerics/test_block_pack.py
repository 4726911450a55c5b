"""Blocks gathered for a handoff and scattered after it, against plain torch."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.kernels.block_pack import pack_blocks, pack_blocks_reference, unpack_blocks
from engine.gpu.kernels.kv_blocks import KvBlocks, dequantize, empty_kv_blocks, quantize
from tests.kernels.gpu.device import BFLOAT16, DEVICE

TYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]


def cache(dtype: torch.dtype, heads: int, size: int, dim: int, layers: int = 2) -> KvBlocks:
    return KvBlocks(*quantize(torch.randn(6, layers, 2, heads, size, dim), dtype))


def moved(blocks: KvBlocks, device: torch.device) -> KvBlocks:
    scales = blocks.scales
    return KvBlocks(blocks.data.to(device), None if scales is None else scales.to(device))


@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("target", TYPES)
def test_types_and_heads_change_on_the_way(source: torch.dtype, target: torch.dtype) -> None:
    held = cache(source, 4, 16, 80, layers=1)
    ids = torch.tensor([4, 0, 5], dtype=torch.int32, device=DEVICE)
    packed = pack_blocks(moved(held, DEVICE), ids, first_head=1, heads=2, dtype=target)
    assert packed.data.is_contiguous()
    expected = pack_blocks_reference(held, ids.cpu(), 1, 2, target)
    found = moved(packed, torch.device("cpu"))
    near = BFLOAT16 if target == torch.bfloat16 and source != target else 0
    torch.testing.assert_close(dequantize(found), dequantize(expected), atol=0, rtol=near)
    back = empty_kv_blocks((7, 1, 2, 3, 16, 80), target, DEVICE)
    places = torch.tensor([6, 2, 1], dtype=torch.int32, device=DEVICE)
    unpack_blocks(packed, back, places, first_head=1)
    there = dequantize(moved(back, torch.device("cpu")))[[6, 2, 1]][:, :, :, 1:]
    assert torch.equal(there, dequantize(found))


@pytest.mark.parametrize(("size", "dim"), [(16, 64), (24, 96), (32, 256)])
def test_blocks_come_back_bit_by_bit(size: int, dim: int) -> None:
    held = moved(cache(torch.bfloat16, 2, size, dim), DEVICE)
    ids = torch.randperm(6, dtype=torch.int32, device=DEVICE)
    packed = pack_blocks(held, ids)
    other = KvBlocks(torch.zeros_like(held.data))
    unpack_blocks(packed, other, ids)
    assert torch.equal(other.data, held.data)


def test_no_blocks_are_nothing() -> None:
    held = moved(cache(torch.float16, 2, 16, 64), DEVICE)
    none = torch.zeros(0, dtype=torch.int32, device=DEVICE)
    assert pack_blocks(held, none).data.shape[0] == 0


def test_what_does_not_fit_is_refused() -> None:
    held = moved(cache(torch.float16, 2, 16, 64), DEVICE)
    ids = torch.tensor([0, 1], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="heads"):
        pack_blocks(held, ids, first_head=1, heads=2)
    with pytest.raises(ValueError, match="int32"):
        pack_blocks(held, ids.long())
    packed = pack_blocks(held, ids)
    with pytest.raises(ValueError, match="2 blocks"):
        unpack_blocks(packed, held, ids[:1])
    with pytest.raises(ValueError, match="differ"):
        unpack_blocks(packed, moved(cache(torch.float16, 2, 32, 64), DEVICE), ids)
