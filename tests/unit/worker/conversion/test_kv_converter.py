"""Converted blocks against a cache of the other layout that was given the same values."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from baton.errors import GeometryMismatch, HandoffError
from baton.request import GroupShape
from engine.kv.kv_cache import KvCache, KvGroup
from kvtransfer.layout.layout import KvLayout
from tests.support.models import plain_config
from worker.conversion.kv_converter import Converter

CPU = torch.device("cpu")
LAYERS, HEADS, DIM = 2, 4, 12
DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "int8": torch.int8,
    "fp8": torch.float8_e4m3fn,
}


def make_cache(layout: KvLayout, blocks: int) -> KvCache:
    """The cache of one rank, whose layout it is."""
    heads = layout.kv_heads
    config = plain_config(layers=LAYERS, heads=heads, kv_heads=heads, head_dim=DIM)
    return KvCache(config, blocks, layout.block_size, DTYPES[layout.kv_dtype], CPU)


def write(cache: KvGroup, layer: int, both: torch.Tensor, table: list[int]) -> None:
    """Keys and values [2, tokens, heads, dim] into the blocks of a table."""
    token = torch.arange(both.shape[1])
    blocks = torch.tensor(table)[token // cache.block_size]
    if cache.scales is None:
        both = both.to(cache.data.dtype)
    cache.write(layer, both[0], both[1], blocks, token % cache.block_size)


def make_source(layout: KvLayout, tokens: int) -> tuple[KvCache, list[int]]:
    """A full cache; a sequence has some of its blocks, not in order."""
    count = -(-tokens // layout.block_size)
    cache = make_cache(layout, 2 * count + 1)
    numbers = torch.Generator().manual_seed(tokens)
    whole = torch.randn(cache.blocks * layout.block_size, generator=numbers)
    table = torch.randperm(cache.blocks, generator=numbers).tolist()
    for layer in range(LAYERS):
        shape = (2, len(whole), HEADS, DIM)
        # Of many sizes, so that a scale that went elsewhere is seen.
        sizes = torch.rand(shape[:-1], generator=numbers).unsqueeze(-1) * 50
        write(cache, layer, torch.randn(shape, generator=numbers) * sizes, table)
    return cache, table[:count]


def expected_blocks(
    cache: KvCache, table: list[int], tokens: int, target: KvLayout, rank: int = 0
) -> torch.Tensor:
    """What a fresh cache of the target holds: uint8 [blocks, block_bytes]."""
    count = -(-tokens // target.block_size)
    other = make_cache(target.of_rank(rank), count)
    heads = list(target.heads_of(rank))
    for layer in range(LAYERS):
        found = torch.cat(cache.gather(layer, torch.tensor([table]), torch.float32))
        values = found[:, heads, :tokens].transpose(1, 2)
        write(other, layer, values, list(range(count)))
    return torch.stack([other.block(block) for block in range(count)])


def all_blocks(cache: KvCache) -> torch.Tensor:
    return torch.stack([cache.block(block) for block in range(cache.blocks)])


def garbage(blocks: int, layout: KvLayout) -> torch.Tensor:
    """What another sequence may have left in staging memory."""
    return torch.full((blocks, layout.block_bytes), 0xFF, dtype=torch.uint8)


def source_layout(dtype: str = "bfloat16", size: int = 16) -> KvLayout:
    return KvLayout(size, LAYERS, HEADS, DIM, dtype)


@pytest.mark.parametrize("target_dtype", DTYPES)
@pytest.mark.parametrize("source_dtype", DTYPES)
@pytest.mark.parametrize(("size", "other"), [(16, 16), (16, 4), (8, 32), (24, 16)])
def test_blocks_are_those_of_a_cache_that_was_given_the_values(
    source_dtype: str, target_dtype: str, size: int, other: int
) -> None:
    source = source_layout(source_dtype, size)
    target = source_layout(target_dtype, other)
    tokens = 101
    cache, table = make_source(source, tokens)
    expected = expected_blocks(cache, table, tokens, target)
    out = garbage(len(expected), target)
    converter = Converter(source, target)
    converter.convert(all_blocks(cache), table, tokens, range(len(expected)), out)
    if source_dtype == target_dtype and target.has_scales:
        check_codes_moved_unchanged(cache, table, tokens, target, out)
    else:
        assert torch.equal(out, expected)


def check_codes_moved_unchanged(
    cache: KvCache, table: list[int], tokens: int, target: KvLayout, out: torch.Tensor
) -> None:
    """Codes and scales of every token are those of the source; what has no token is zero."""
    moved = make_cache(target, len(out))
    for block, data in enumerate(out):
        moved.block(block).copy_(data)
    assert moved.scales is not None
    assert cache.scales is not None
    codes, other_codes = cache.data.view(torch.uint8), moved.data.view(torch.uint8)
    for token in range(tokens):
        block, slot = divmod(token, cache.block_size)
        there, place = divmod(token, moved.block_size)
        taken = (table[block], slice(None), slice(None), slice(None), slot)
        given = (there, slice(None), slice(None), slice(None), place)
        assert torch.equal(codes[taken], other_codes[given])
        assert torch.equal(cache.scales[taken], moved.scales[given])
        other_codes[given] = 0
        moved.scales[given] = 0
    assert not any(moved.block(block).any() for block in range(len(out)))


@pytest.mark.parametrize(
    ("source_dtype", "dtype"), [("bfloat16", "bfloat16"), ("bfloat16", "fp8"), ("int8", "float32")]
)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_each_target_rank_gets_its_heads(ranks: int, source_dtype: str, dtype: str) -> None:
    source = source_layout(source_dtype, 8)
    target = replace(source_layout(dtype, 16), tensor_parallel=ranks)
    cache, table = make_source(source, 40)
    for rank in range(ranks):
        expected = expected_blocks(cache, table, 40, target, rank)
        out = garbage(len(expected), target.of_rank(rank))
        Converter(source, target, rank).convert(
            all_blocks(cache), table, 40, range(len(expected)), out
        )
        assert torch.equal(out, expected)


def test_the_wanted_blocks_come_in_the_order_in_which_they_are_named() -> None:
    source, target = source_layout(size=16), source_layout("int8", 8)
    cache, table = make_source(source, 50)
    wanted = [5, 0, 6, 3]
    out = garbage(len(wanted), target)
    Converter(source, target).convert(all_blocks(cache), table, 50, wanted, out)
    assert torch.equal(out, expected_blocks(cache, table, 50, target)[wanted])


def test_padding_is_zeros() -> None:
    """Also where every slot has its token."""
    source = source_layout(size=3)
    target = replace(source_layout(size=1), tensor_parallel=4)
    there = target.of_rank(1)
    assert there.used_bytes < there.block_bytes
    cache, table = make_source(source, 6)
    out = garbage(6, there)
    Converter(source, target, 1).convert(all_blocks(cache), table, 6, range(6), out)
    assert torch.equal(out, expected_blocks(cache, table, 6, target, 1))


def test_more_values_than_are_converted_at_once() -> None:
    source, target = source_layout(size=16), source_layout("int8", 16)
    tokens = 12_000
    assert tokens * LAYERS * 2 * HEADS * DIM > 2 << 20
    cache, table = make_source(source, tokens)
    expected = expected_blocks(cache, table, tokens, target)
    out = garbage(len(expected), target)
    Converter(source, target).convert(all_blocks(cache), table, tokens, range(len(out)), out)
    assert torch.equal(out, expected)


def test_none_wanted() -> None:
    source, target = source_layout(), source_layout("int8")
    cache, table = make_source(source, 16)
    Converter(source, target).convert(all_blocks(cache), table, 16, [], garbage(0, target))


def test_bits_of_equal_types_are_kept() -> None:
    """Also those of a NaN, which arithmetic might change."""
    source, target = source_layout(size=4), source_layout(size=8)
    data = torch.randint(0, 256, (4, source.block_bytes), dtype=torch.uint8)
    out, back = garbage(2, target), garbage(4, source)
    Converter(source, target).convert(data, [2, 0, 3, 1], 16, [0, 1], out)
    Converter(target, source).convert(out, [0, 1], 16, range(4), back)
    assert torch.equal(
        back[:, : source.used_bytes], data[torch.tensor([2, 0, 3, 1])][:, : source.used_bytes]
    )


@pytest.mark.parametrize("wanted", [[-1], [3], [0, 99]])
def test_a_block_without_a_token_is_refused(wanted: list[int]) -> None:
    source, target = source_layout(size=16), source_layout(size=8)
    cache, table = make_source(source, 24)
    with pytest.raises(HandoffError, match="is outside"):
        Converter(source, target).convert(
            all_blocks(cache), table, 24, wanted, garbage(len(wanted), target)
        )


def test_a_table_that_is_too_short_is_refused() -> None:
    source, target = source_layout(size=16), source_layout(size=8)
    cache, table = make_source(source, 24)
    with pytest.raises(HandoffError, match="1 blocks cannot hold 24"):
        Converter(source, target).convert(all_blocks(cache), table[:1], 24, [0], garbage(1, target))


def test_tensors_of_other_shapes_are_refused() -> None:
    source, target = source_layout(size=16), source_layout(size=8)
    cache, table = make_source(source, 24)
    data, out = all_blocks(cache), garbage(1, target)
    converter = Converter(source, target)
    with pytest.raises(ValueError, match="the cache must be"):
        converter.convert(data[:, 1:], table, 24, [0], out)
    with pytest.raises(ValueError, match="out must be"):
        converter.convert(data, table, 24, [0, 1], out)
    with pytest.raises(ValueError, match="out on meta"):
        converter.convert(data, table, 24, [0], out.to("meta"))


def test_layouts_that_do_not_fit_are_refused() -> None:
    source = source_layout()
    with pytest.raises(GeometryMismatch, match=r"head_dim=12.*head_dim=8"):
        Converter(source, replace(source, head_dim=8))
    with pytest.raises(GeometryMismatch, match="no rank 2"):
        Converter(source, replace(source, tensor_parallel=2), target_rank=2)
    with pytest.raises(GeometryMismatch, match="no rank holds whole blocks"):
        Converter(replace(source, tensor_parallel=2), source)


@pytest.mark.parametrize(("size", "other"), [(16, 16), (16, 4), (8, 32), (24, 16)])
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_a_drafters_part_is_converted_too(dtype: str, size: int, other: int) -> None:
    tokens, filled = 101, 77
    source = replace(source_layout("bfloat16", size), drafter=GroupShape(1, 2, 8))
    target = replace(source_layout(dtype, other), drafter=GroupShape(1, 2, 8))
    config = plain_config(layers=LAYERS, heads=HEADS, kv_heads=HEADS, head_dim=DIM)
    draft = plain_config(layers=1, heads=2, kv_heads=2, head_dim=8)
    cache = KvCache(config, 20, size, torch.bfloat16, CPU, drafter=draft)
    group = cache.drafter
    assert group is not None
    count = -(-tokens // size)
    table = torch.randperm(20, generator=torch.Generator().manual_seed(1)).tolist()[:count]
    values = torch.randn(2, tokens, 2, 8, generator=torch.Generator().manual_seed(2)).bfloat16()
    write(group, 0, values, table)
    for place, block in enumerate(table):
        group.filled[block] = max(0, min(size, filled - place * size))
    # Behind a gap nothing counts.
    group.filled[table[-1]] = tokens - (count - 1) * size
    wanted = range(-(-tokens // other))
    out = garbage(len(wanted), target)
    Converter(source, target).convert(all_blocks(cache), table, tokens, wanted, out)
    there = KvCache(config, len(wanted), other, DTYPES[dtype], CPU, drafter=draft)
    there.bytes.copy_(out)
    moved = there.drafter
    assert moved is not None
    assert sum(moved.filled.tolist()) == filled
    assert all(count == other for count in moved.filled.tolist()[: filled // other])
    expected = KvCache(config, len(wanted), other, DTYPES[dtype], CPU, drafter=draft).drafter
    assert expected is not None
    write(expected, 0, values.float(), list(wanted))
    assert torch.equal(moved.data.view(torch.uint8), expected.data.view(torch.uint8))
    if moved.scales is not None and expected.scales is not None:
        assert torch.equal(moved.scales, expected.scales)
