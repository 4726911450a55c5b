"""Codes of keys and values, and a cache's blocks that hold them."""

from __future__ import annotations

import pytest
import torch

from baton.errors import ConfigError
from baton.request import Geometry
from engine.kv.kv_cache import KvCache, block_bytes
from engine.kv.kv_quantization import dequantize_kv, kv_dtype, quantize_kv
from tests.support.models import plain_config

CPU = torch.device("cpu")
CODES = [torch.int8, torch.float8_e4m3fn]
LAYERS, HEADS, SIZE, DIM = 3, 2, 16, 24
CONFIG = plain_config(layers=LAYERS, heads=HEADS, kv_heads=HEADS, head_dim=DIM)


def some_values(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(("codes", "most"), [(torch.int8, 0.004), (torch.float8_e4m3fn, 0.0625)])
def test_an_error_is_a_part_of_the_largest_value(codes: torch.dtype, most: float) -> None:
    values = some_values(50, 64)
    found = dequantize_kv(*quantize_kv(values, codes))
    error = (found - values).abs()
    bound = values if codes.is_floating_point else values.abs().amax(-1, keepdim=True)
    assert (error <= most * bound.abs() + 1e-4).all()


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_an_outlier_costs_only_its_own_row(codes: torch.dtype) -> None:
    values = some_values(8, 64)
    expected = dequantize_kv(*quantize_kv(values, codes))
    values[3, 5] = 1e4
    found = dequantize_kv(*quantize_kv(values, codes))
    others = torch.arange(8) != 3
    assert torch.equal(found[others], expected[others])
    assert found[3, 5] == pytest.approx(1e4)


@pytest.mark.parametrize("codes", CODES, ids=str)
@pytest.mark.parametrize("value", [0.0, 1e-44, 1e-38, 3e38])
def test_extreme_rows_stay_finite(codes: torch.dtype, value: float) -> None:
    found = dequantize_kv(*quantize_kv(torch.tensor([[value, -value, 0.0]]), codes))
    assert found.isfinite().all()
    assert found[0, 0] == pytest.approx(value, rel=0.1, abs=1e-43)


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_what_is_written_comes_back_as_codes(codes: torch.dtype) -> None:
    cache = KvCache(CONFIG, 5, SIZE, codes, CPU)
    keys, values = some_values(2, 20, HEADS, DIM)
    blocks = torch.tensor([3] * SIZE + [1] * 4)
    slots = torch.tensor([*range(SIZE), *range(4)])
    cache.write(1, keys, values, blocks, slots)
    found = cache.gather(1, torch.tensor([[3, 1]]), torch.float32)
    for got, source in zip(found, (keys, values), strict=True):
        expected = dequantize_kv(*quantize_kv(source, codes)).transpose(0, 1)
        assert torch.equal(got[0, :, :20], expected)
    other = cache.gather(0, torch.tensor([[3, 1]]), torch.bfloat16)
    assert other[0].dtype == torch.bfloat16
    assert not other[0].any()


@pytest.mark.parametrize("codes", CODES, ids=str)
def test_a_block_is_codes_and_then_scales(codes: torch.dtype) -> None:
    """One piece of bytes, which is all that a handoff moves."""
    one, other = (KvCache(CONFIG, 4, SIZE, codes, CPU) for _ in range(2))
    rows = LAYERS * 2 * HEADS * SIZE
    assert one.block_bytes == block_bytes(CONFIG, SIZE, codes)
    assert one.block_bytes % 64 == 0
    assert rows * (DIM + 4) <= one.block_bytes < rows * (DIM + 4) + 64
    keys, values = some_values(2, SIZE, HEADS, DIM)
    for layer in range(LAYERS):
        one.write(layer, keys + layer, values, torch.full((SIZE,), 2), torch.arange(SIZE))
    raw = one.block(2)
    assert raw.is_contiguous()
    assert one.scales is not None
    assert one.scales.is_contiguous() is False
    assert torch.equal(raw[: rows * DIM], one.data[2].contiguous().view(torch.uint8).flatten())
    assert torch.equal(
        raw[rows * DIM : rows * (DIM + 4)].view(torch.float32), one.scales[2].flatten()
    )
    other.block(1).copy_(raw)
    for layer in range(LAYERS):
        first = one.gather(layer, torch.tensor([[2]]), torch.float32)
        second = other.gather(layer, torch.tensor([[1]]), torch.float32)
        assert all(torch.equal(x, y) for x, y in zip(first, second, strict=True))


def test_geometries_name_the_codes() -> None:
    types = (torch.bfloat16, torch.int8, torch.float8_e4m3fn)
    found = [KvCache(CONFIG, 2, SIZE, dtype, CPU).geometry for dtype in types]
    expected = [Geometry(SIZE, LAYERS, HEADS, DIM, name) for name in ("bfloat16", "int8", "fp8")]
    assert found == expected


def test_names() -> None:
    assert kv_dtype("auto", torch.float16) == torch.float16
    assert kv_dtype("int8", torch.float16) == torch.int8
    assert kv_dtype("fp8", torch.bfloat16) == torch.float8_e4m3fn
    with pytest.raises(ConfigError, match="known: auto, int8, fp8"):
        kv_dtype("int4", torch.bfloat16)
