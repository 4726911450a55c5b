"""The CPU kernel of single queries against the definition of attention."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import attend_dense
from engine.cpu_attention import attention_kernel
from engine.cpu_library import cpu_library

LAYERS = 2


@pytest.fixture(autouse=True)
def needs_kernels() -> None:
    if cpu_library() is None:
        pytest.skip("no AVX512-BF16, or no C++ compiler here")


def check(
    lengths: list[int], *, group: int, kv_heads: int, dim: int, block_size: int, layer: int
) -> None:
    generator = torch.Generator().manual_seed(sum(lengths))
    width = -(-max(lengths) // block_size)
    blocks = width * len(lengths)
    # What no query may see is not even a number.
    data = torch.full(
        (blocks, LAYERS, 2, kv_heads, block_size, dim), torch.nan, dtype=torch.bfloat16
    )
    tables = torch.randperm(blocks, generator=generator).view(len(lengths), width)
    keys, values = [], []
    for table, length in zip(tables, lengths, strict=True):
        key, value = (torch.randn(length, kv_heads, dim, generator=generator) for _ in "kv")
        for position in range(length):
            block, slot = table[position // block_size], position % block_size
            data[block, layer, 0, :, slot] = key[position].bfloat16()
            data[block, layer, 1, :, slot] = value[position].bfloat16()
        keys.append(key.bfloat16())
        values.append(value.bfloat16())
    queries = torch.randn(len(lengths), group * kv_heads, dim, generator=generator).bfloat16()
    kernel = attention_kernel(data)
    assert kernel is not None
    found = kernel(queries, tables, torch.tensor(lengths), layer)
    for index, length in enumerate(lengths):
        expected = attend_dense(
            queries[index : index + 1], keys[index], values[index], length - 1
        ).view(group * kv_heads, dim)
        torch.testing.assert_close(found[index].float(), expected, rtol=1e-2, atol=1e-2)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(
    lengths=st.lists(st.integers(1, 100), min_size=1, max_size=4),
    group=st.integers(1, 4),
    kv_heads=st.integers(1, 3),
    dim=st.sampled_from([32, 64, 96, 128]),
    block_size=st.sampled_from([16, 32, 48]),
    layer=st.integers(0, LAYERS - 1),
)
def test_equals_the_definition(
    lengths: list[int], group: int, kv_heads: int, dim: int, block_size: int, layer: int
) -> None:
    check(lengths, group=group, kv_heads=kv_heads, dim=dim, block_size=block_size, layer=layer)


def test_a_long_context() -> None:
    check([4097, 1], group=3, kv_heads=1, dim=64, block_size=16, layer=1)


def test_scores_far_apart() -> None:
    """The exponential of what is far below the maximum is 0, not something odd."""
    data = torch.zeros(1, 1, 2, 1, 16, 32, dtype=torch.bfloat16)
    data[0, 0, 0, 0, 3] = 100.0
    data[0, 0, 0, 0, 4] = -100.0
    data[0, 0, 1, 0] = torch.arange(16)[:, None]
    kernel = attention_kernel(data)
    assert kernel is not None
    queries = torch.full((1, 1, 32), 10.0, dtype=torch.bfloat16)
    found = kernel(queries, torch.zeros(1, 1, dtype=torch.int64), torch.tensor([16]), 0)
    assert torch.equal(found, torch.full_like(found, 3.0))


def test_threads_share_the_sequences() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        check([17, 40, 3], group=2, kv_heads=3, dim=64, block_size=16, layer=0)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("dtype", "block_size", "dim"),
    [(torch.float32, 16, 64), (torch.bfloat16, 8, 64), (torch.bfloat16, 16, 80)],
)
def test_what_does_not_fit_is_left_to_torch(dtype: torch.dtype, block_size: int, dim: int) -> None:
    assert attention_kernel(torch.zeros(1, 1, 2, 1, block_size, dim, dtype=dtype)) is None


@settings(deadline=None, derandomize=True, max_examples=40)
@given(start=st.integers(0, 70), count=st.integers(1, 50), group=st.integers(1, 3))
def test_a_chunk_shares_its_table(start: int, count: int, group: int) -> None:
    generator = torch.Generator().manual_seed(start)
    kv_heads, dim, size = 2, 64, 16
    end = start + count
    blocks = -(-end // size)
    data = torch.full((blocks, 1, 2, kv_heads, size, dim), torch.nan, dtype=torch.bfloat16)
    table = torch.randperm(blocks, generator=generator)[None]
    key, value = (torch.randn(end, kv_heads, dim, generator=generator).bfloat16() for _ in "kv")
    positions = torch.arange(end)
    where, slots = table[0, positions // size], positions % size
    data[where, 0, 0, :, slots], data[where, 0, 1, :, slots] = key, value
    queries = torch.randn(count, group * kv_heads, dim, generator=generator).bfloat16()
    kernel = attention_kernel(data)
    assert kernel is not None
    lengths = torch.arange(start + 1, end + 1)
    found = kernel(queries, table, lengths, 0)
    expected = attend_dense(queries, key, value, start).view_as(queries.float())
    torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    # However the prompt is cut, a token's result is the same to the bit.
    alone = [kernel(queries[i : i + 1], table, lengths[i : i + 1], 0) for i in range(count)]
    assert torch.equal(found, torch.cat(alone))
