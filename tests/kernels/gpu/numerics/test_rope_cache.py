"""Rotation and the cache's write against plain torch."""

from __future__ import annotations

import pytest
import torch

from engine.gpu.kernels.kv_blocks import KvBlocks, dequantize, empty_kv_blocks
from engine.gpu.kernels.rope_cache import rope_cache, rope_cache_reference
from engine.model.rope import apply_rope
from tests.kernels.gpu.device import BFLOAT16, DEVICE

TOKENS, BLOCKS, SIZE, POSITIONS = 5, 4, 16, 50
FP8 = torch.float8_e4m3fn


def empty(kv_heads: int, dim: int, dtype: torch.dtype) -> KvBlocks:
    blocks = empty_kv_blocks((BLOCKS, 2, 2, kv_heads, SIZE, dim), dtype, torch.device("cpu"))
    blocks.data.view(torch.uint8).zero_()
    if blocks.scales is not None:
        blocks.scales.zero_()
    return blocks


def on_device(blocks: KvBlocks) -> KvBlocks:
    scales = None if blocks.scales is None else blocks.scales.to(DEVICE, copy=True)
    return KvBlocks(blocks.data.to(DEVICE, copy=True), scales)


def near(dtype: torch.dtype) -> float:
    return {torch.float32: 1e-5, torch.float16: 1e-3, torch.bfloat16: BFLOAT16}[dtype]


SHAPES = [(9, 3, 64, 64), (4, 1, 80, 32), (3, 3, 96, 96), (8, 1, 256, 256), (1, 1, 64, 2)]
"""Heads, KV heads, head_dim, rotated dimensions."""
TYPES = [
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.float16, None),
    (torch.float32, FP8),
    (torch.bfloat16, FP8),
    (torch.float16, torch.int8),
]


@pytest.mark.parametrize(
    ("shape", "types", "normed"),
    [
        *((SHAPES[1], types, normed) for types in TYPES for normed in (False, True)),
        *((shape, TYPES[4], True) for shape in SHAPES),
        *(pytest.param(shape, TYPES[4], False, marks=pytest.mark.long) for shape in SHAPES),
    ],
)
def test_equals_plain_torch(
    shape: tuple[int, int, int, int], types: tuple[torch.dtype, torch.dtype | None], normed: bool
) -> None:
    (heads, kv_heads, dim, rotated), (dtype, kv) = shape, types
    widths = [heads * dim, kv_heads * dim, kv_heads * dim]
    both = torch.randn(TOKENS, sum(widths)).to(dtype)
    table = torch.randn(POSITIONS, 2, rotated // 2)
    positions = torch.randint(0, POSITIONS, (TOKENS,))
    slots = torch.randperm(BLOCKS * SIZE)[:TOKENS]
    slots[2] = -1
    query_weight, key_weight = (torch.randn(dim) if normed else None for _ in range(2))
    expected = empty(kv_heads, dim, kv or dtype)
    found = on_device(expected)

    def part(x: torch.Tensor, number: int) -> torch.Tensor:
        first = sum(widths[:number])
        return x[:, first : first + widths[number]].view(TOKENS, -1, dim)

    turned = rope_cache_reference(
        part(both, 0),
        part(both, 1),
        part(both, 2),
        expected,
        1,
        table,
        positions,
        slots,
        query_weight=query_weight,
        key_weight=key_weight,
        eps=1e-5,
    )
    there = both.to(DEVICE)
    queries = rope_cache(
        part(there, 0),
        part(there, 1),
        part(there, 2),
        found,
        1,
        table.to(DEVICE),
        positions.to(DEVICE),
        slots.to(DEVICE),
        query_weight=None if query_weight is None else query_weight.to(DEVICE),
        key_weight=None if key_weight is None else key_weight.to(DEVICE),
        eps=1e-5,
    )
    assert queries.dtype == dtype
    tolerance = near(dtype)
    torch.testing.assert_close(queries.cpu(), turned, atol=tolerance, rtol=tolerance)
    cached = KvBlocks(found.data.cpu(), None if found.scales is None else found.scales.cpu())
    # A code may be another where a sum's rounding puts a number on the other side of the middle.
    tolerance = tolerance if kv is None else 2**-3
    torch.testing.assert_close(
        dequantize(cached), dequantize(expected), atol=tolerance, rtol=tolerance
    )
    if cached.scales is not None and expected.scales is not None:
        torch.testing.assert_close(cached.scales, expected.scales, atol=0, rtol=1e-5)
        different = cached.data.view(torch.uint8) != expected.data.view(torch.uint8)
        assert int(different.sum()) <= 2


def test_zeros_have_codes_and_a_scale() -> None:
    zeros = torch.zeros(1, 1, 64, device=DEVICE)
    blocks = on_device(empty(1, 64, torch.int8))
    nothing = torch.zeros(1, dtype=torch.int64, device=DEVICE)
    table = torch.ones(1, 2, 32, device=DEVICE)
    rope_cache(zeros, zeros, zeros, blocks, 0, table, nothing, nothing)
    assert not blocks.data.any()
    assert blocks.scales is not None
    assert float(blocks.scales[0, 0, 0, 0, 0]) == 1.0


def test_the_reference_rotates_as_the_engine_does() -> None:
    queries, table = torch.randn(TOKENS, 2, 64), torch.randn(POSITIONS, 2, 32)
    positions = torch.randint(0, POSITIONS, (TOKENS,))
    keys = torch.randn(TOKENS, 1, 64)
    blocks = empty(1, 64, torch.float32)
    slots = torch.arange(TOKENS)
    turned = rope_cache_reference(queries, keys, keys, blocks, 0, table, positions, slots)
    assert torch.equal(turned, apply_rope(queries, table[positions]))
    assert torch.equal(blocks.data[0, 0, 0, 0, :TOKENS], apply_rope(keys, table[positions])[:, 0])
    assert torch.equal(blocks.data[0, 0, 1, 0, :TOKENS], keys[:, 0])


def test_what_does_not_fit_is_refused() -> None:
    x = torch.zeros(2, 2, 64, device=DEVICE)
    blocks = on_device(empty(2, 64, torch.float32))
    table = torch.zeros(4, 2, 32, device=DEVICE)
    at = torch.zeros(2, dtype=torch.int64, device=DEVICE)
    weight = torch.ones(64, device=DEVICE)
    refused = [
        (x, x[:, :1], x, table, at, at, None, None),
        (x, x.half(), x, table, at, at, None, None),
        (x, x, x, table[:, :1], at, at, None, None),
        (x, x, x, table.half(), at, at, None, None),
        (x, x, x, torch.zeros(4, 2, 33, device=DEVICE), at, at, None, None),
        (x, x, x, table, at[1:], at, None, None),
        (x, x, x, table, at, at.int(), None, None),
        (x, x, x, table, at, at, weight, None),
        (x, x, x, table, at, at, weight[1:], weight),
        (x.transpose(1, 2).contiguous().transpose(1, 2), x, x, table, at, at, None, None),
    ]
    for queries, keys, values, angles, positions, slots, first, second in refused:
        with pytest.raises(ValueError, match=r"\w"):
            rope_cache(
                queries,
                keys,
                values,
                blocks,
                0,
                angles,
                positions,
                slots,
                query_weight=first,
                key_weight=second,
            )
