"""The bytes of a block, as the engine's cache lays them."""

from __future__ import annotations

import itertools

import pytest
import torch

from baton.errors import GeometryMismatch
from baton.request import Geometry, GroupShape
from engine.kv.kv_cache import KvCache, block_bytes
from kvtransfer.layout.layout import KvLayout
from tests.support.models import plain_config

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int8, torch.float8_e4m3fn]
SHAPES = [(16, 3, 2, 24), (1, 1, 1, 4), (5, 2, 3, 8), (64, 1, 4, 12)]
"""(block size, layers, heads, head dim)"""


def offset_in_block(cache: KvCache, part: torch.Tensor, index: tuple[int, ...]) -> int:
    """Where a tensor's element lies in block 1 of the cache."""
    return part[(1, *index)].data_ptr() - cache.block(1).data_ptr()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_layout_is_that_of_the_engines_cache(
    dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    size, layers, heads, dim = shape
    config = plain_config(layers=layers, heads=heads, kv_heads=heads, head_dim=dim)
    cache = KvCache(config, 2, size, dtype, CPU)
    layout = KvLayout.of(cache.geometry)
    assert layout.block_bytes == cache.block_bytes == block_bytes(config, size, dtype)
    assert layout.value_bytes == dtype.itemsize
    assert layout.has_scales == (cache.scales is not None)
    assert layout.used_bytes <= layout.block_bytes < layout.used_bytes + 64
    for index in itertools.product(range(layers), range(2), range(heads), range(size)):
        row = layout.row(*index)
        assert layout.code_offset(row) == offset_in_block(cache, cache.data, (*index, 0))
        if cache.scales is not None:
            assert layout.scale_offset(row) == offset_in_block(cache, cache.scales, index)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_drafters_part_lies_behind_the_models(
    dtype: torch.dtype, shape: tuple[int, int, int, int]
) -> None:
    size, layers, heads, dim = shape
    config = plain_config(layers=2, heads=3, kv_heads=3, head_dim=4)
    draft = plain_config(layers=layers, heads=heads, kv_heads=heads, head_dim=dim)
    cache = KvCache(config, 2, size, dtype, CPU, drafter=draft)
    geometry = cache.geometry
    assert geometry.drafter == GroupShape(layers, heads, dim)
    layout = KvLayout.of(geometry)
    assert layout.block_bytes == cache.block_bytes == block_bytes(config, size, dtype, draft)
    assert layout.target_bytes == block_bytes(config, size, dtype)
    group, part = cache.drafter, layout.drafter_layout
    assert group is not None
    assert part is not None
    begin = layout.target_bytes
    for index in itertools.product(range(layers), range(2), range(heads), range(size)):
        row = part.row(*index)
        found = offset_in_block(cache, group.data, (*index, 0))
        assert begin + part.code_offset(row) == found
        if group.scales is not None:
            found = offset_in_block(cache, group.scales, index)
            assert begin + part.scale_offset(row) == found
    assert begin + part.filled_offset == offset_in_block(cache, group.filled, ())
    assert begin + part.filled_offset + 8 <= layout.block_bytes
    runs = [run for layer in range(2) for run in layout.layer_runs(layer, layer + 1)]
    assert sum(length for _, length in runs) == layout.block_bytes
    assert max(offset + length for offset, length in runs) == layout.block_bytes
    cache.bytes[:] = 0
    group.data.view(torch.uint8).fill_(1)
    group.filled.fill_(-1)
    assert not cache.bytes[:, :begin].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_rank_has_the_blocks_of_a_model_with_its_heads_alone(dtype: torch.dtype) -> None:
    config = plain_config(layers=2, heads=2, kv_heads=2, head_dim=8)
    cache = KvCache(config, 1, 16, dtype, CPU)
    layout = KvLayout(16, 2, 8, 8, cache.geometry.kv_dtype, tensor_parallel=4)
    for rank in range(4):
        assert layout.of_rank(rank).block_bytes == cache.block_bytes
    with pytest.raises(GeometryMismatch, match="has no block size"):
        _ = layout.block_bytes


def test_one_rank_may_hold_a_head_more_than_another() -> None:
    layout = KvLayout(16, 2, 3, 8, "int8", 2, GroupShape(1, 5, 8))
    one, two = layout.of_rank(0), layout.of_rank(1)
    assert one == KvLayout(16, 2, 1, 8, "int8", drafter=GroupShape(1, 2, 8))
    assert two == KvLayout(16, 2, 2, 8, "int8", drafter=GroupShape(1, 3, 8))
    assert one.block_bytes < two.block_bytes


def test_the_only_rank_has_the_layout_itself() -> None:
    layout = KvLayout(16, 2, 3, 8, "int8")
    assert layout.of_rank(0) is layout


@pytest.mark.parametrize(
    ("heads", "ranks", "expected"),
    [
        (4, 1, [[0, 1, 2, 3]]),
        (4, 2, [[0, 1], [2, 3]]),
        (3, 3, [[0], [1], [2]]),
        (2, 8, [[0], [0], [0], [0], [1], [1], [1], [1]]),
        (1, 2, [[0], [0]]),
        (3, 2, [[0], [1, 2]]),
        (2, 3, [[0], [0], [1]]),
        (9, 4, [[0, 1], [2, 3], [4, 5], [6, 7, 8]]),
    ],
)
def test_ranks_share_the_heads(heads: int, ranks: int, expected: list[list[int]]) -> None:
    layout = KvLayout(16, 1, heads, 8, "bfloat16", ranks)
    assert [list(layout.heads_of(rank)) for rank in range(ranks)] == expected
    for head in range(heads):
        assert list(layout.ranks_of(head)) == [r for r in range(ranks) if head in expected[r]]


def test_what_a_peer_may_not_say_is_refused() -> None:
    good = Geometry(16, 2, 4, 64, "int8", 2)
    assert KvLayout.of(good) == KvLayout(16, 2, 4, 64, "int8", 2)
    for place in (0, 1, 2, 3, 5):
        fields: list[int | str] = [16, 2, 4, 64, "int8", 2]
        fields[place] = 0
        with pytest.raises(GeometryMismatch, match="below 1"):
            KvLayout.of(Geometry(*fields))  # type: ignore[arg-type]
    with pytest.raises(GeometryMismatch, match=r"int3.*known: float32"):
        KvLayout.of(Geometry(16, 2, 4, 64, "int3"))
