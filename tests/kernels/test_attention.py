"""Paged attention against its definition, and the definition against loops over numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.model_config import ModelConfig
from engine.kv.kv_cache import KvCache
from engine.kv.kv_quantization import dequantize_kv, quantize_kv
from engine.model.attention import attend, attention_meta
from engine.scheduling.plan import PlanRow
from tests.support.engine.dense_attention import attend_dense
from tests.support.models import plain_config

CPU = torch.device("cpu")
LAYERS = 2
GARBAGE = 1e3
"""What lies in slots that no sequence of the batch has written: a mask that leaks shows it."""

TOLERANCE = {torch.float32: 1e-5, torch.float16: 3e-3, torch.bfloat16: 3e-2}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@dataclass(frozen=True)
class Shape:
    """Of a cache and its heads; the query heads are ``group`` times the KV heads."""

    block_size: int
    kv_heads: int
    group: int
    dim: int

    @property
    def heads(self) -> int:
        return self.kv_heads * self.group

    def config(self) -> ModelConfig:
        hidden = self.heads * self.dim
        return plain_config(
            hidden_size=hidden,
            layers=LAYERS,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
        )


def check_batch(
    shape: Shape,
    spans: list[tuple[int, int]],
    dtype: torch.dtype,
    seed: int = 0,
    codes: torch.dtype | None = None,
    **scoring: Any,
) -> None:
    """One batch of sequences, each with ``(start, count)``, in blocks scattered over the cache.

    ``codes``: the cache's type, if not ``dtype``; ``scoring``: scale, window and softcap.
    """
    torch.manual_seed(seed)
    size = shape.block_size
    needed = [-(-(start + count) // size) for start, count in spans]
    cache = KvCache(shape.config(), sum(needed) + 3, size, codes or dtype, CPU)
    if cache.scales is None:
        cache.data.fill_(GARBAGE)
    else:
        cache.data.view(torch.uint8).fill_(100)
        cache.scales.fill_(GARBAGE)

    def kept(values: torch.Tensor) -> torch.Tensor:
        """What the cache makes of keys or values."""
        return values if codes is None else dequantize_kv(*quantize_kv(values, codes))

    free = iter(torch.randperm(cache.blocks).tolist())
    rows, keys, values, queries = [], [], [], []
    for number, (start, count) in enumerate(spans):
        table = tuple(next(free) for _ in range(needed[number]))
        rows.append(PlanRow(number, start, count, table, True))
        keys.append(torch.randn(start + count, shape.kv_heads, shape.dim).to(dtype))
        values.append(torch.randn(start + count, shape.kv_heads, shape.dim).to(dtype))
        queries.append(torch.randn(count, shape.heads, shape.dim).to(dtype))
        positions = torch.arange(start + count)
        blocks = torch.tensor(table)[positions // size]
        for layer in range(LAYERS):
            # Each layer's own, so that a mix-up of layers shows.
            cache.write(layer, keys[-1] + layer, values[-1] - layer, blocks, positions % size)
    new = [slice(start, start + count) for start, count in spans]
    meta = attention_meta(tuple(rows), size, CPU)
    for layer in range(LAYERS):
        found = attend(
            torch.cat(queries),
            torch.cat([key[span] + layer for key, span in zip(keys, new, strict=True)]),
            torch.cat([value[span] - layer for value, span in zip(values, new, strict=True)]),
            cache,
            layer,
            meta,
            **scoring,
        )
        expected = torch.cat(
            [
                attend_dense(query, kept(key + layer), kept(value - layer), start, **scoring)
                for query, key, value, (start, _) in zip(queries, keys, values, spans, strict=True)
            ]
        )
        assert found.dtype == dtype
        assert found.shape == expected.shape
        worst = (found.float() - expected).abs().max().item()
        assert worst <= TOLERANCE[dtype], f"layer {layer}: {worst}"


SPANS = st.lists(
    st.one_of(
        st.tuples(st.integers(0, 70), st.just(1)),
        st.tuples(st.just(0), st.integers(1, 40)),
        st.tuples(st.integers(1, 70), st.integers(2, 40)),
    ),
    min_size=1,
    max_size=6,
)
SHAPES = st.builds(
    Shape, st.integers(1, 32), st.sampled_from((1, 2, 3)), st.sampled_from((1, 2, 3, 4)), st.just(8)
)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(SHAPES, SPANS)
def test_any_batch_attends_as_the_definition_says(
    shape: Shape, spans: list[tuple[int, int]]
) -> None:
    check_batch(shape, spans, torch.float32)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(SHAPES, SPANS, st.integers(0, 50), st.sampled_from((0.0, 1.5)), st.floats(0.1, 2.0))
def test_windows_soft_caps_and_scales_are_as_the_definition_says(
    shape: Shape, spans: list[tuple[int, int]], window: int, softcap: float, scale: float
) -> None:
    check_batch(shape, spans, torch.float32, window=window, softcap=softcap, scale=scale)


@pytest.mark.parametrize("block_size", [1, 4, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_windows_that_end_around_block_boundaries(block_size: int, offset: int) -> None:
    shape = Shape(block_size, kv_heads=2, group=2, dim=16)
    for window in {max(1, blocks * block_size + offset) for blocks in range(1, 4)}:
        spans = [(window + more, 1) for more in range(block_size + 2)]
        check_batch(shape, spans, torch.float32, window=window)
        chunks = [(more, 9) for more in range(block_size + 2)]
        check_batch(shape, chunks, torch.float32, window=window)


@pytest.mark.parametrize("scoring", [{"window": 300}, {"softcap": 2.0}, {"window": 40}])
@pytest.mark.parametrize("span", [(0, 700), (130, 600)])
def test_a_chunk_of_many_tiles(span: tuple[int, int], scoring: dict[str, Any]) -> None:
    check_batch(Shape(16, kv_heads=1, group=2, dim=8), [span], torch.float32, **scoring)


@pytest.mark.parametrize("scoring", [{"window": 20}, {"softcap": 2.0}, {"scale": 0.05}])
def test_half_precision_windows_soft_caps_and_scales(scoring: dict[str, Any]) -> None:
    spans = [(0, 40), (33, 1), (16, 17), (0, 1), (31, 1)]
    check_batch(Shape(16, kv_heads=3, group=3, dim=64), spans, torch.bfloat16, **scoring)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_half_precision_is_near_the_definition(block_size: int, dtype: torch.dtype) -> None:
    shape = Shape(block_size, kv_heads=3, group=3, dim=64)
    check_batch(shape, [(0, 40), (33, 1), (16, 17), (0, 1), (31, 1)], dtype)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(SHAPES, SPANS, st.sampled_from((0, 20)), st.sampled_from((torch.int8, torch.float8_e4m3fn)))
def test_codes_count_for_what_they_stand_for(
    shape: Shape, spans: list[tuple[int, int]], window: int, codes: torch.dtype
) -> None:
    check_batch(shape, spans, torch.float32, codes=codes, window=window)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("offset", [-1, 0, 1])
def test_around_every_block_boundary(block_size: int, offset: int) -> None:
    shape = Shape(block_size, kv_heads=2, group=2, dim=16)
    ends = [max(1, blocks * block_size + offset) for blocks in range(1, 5)]
    check_batch(shape, [(end - 1, 1) for end in ends], torch.float32)
    check_batch(shape, [(0, end) for end in ends], torch.float32)
    check_batch(shape, [(end, block_size + 1) for end in ends], torch.float32)


@pytest.mark.parametrize("group", [1, 2, 8])
def test_one_query_token_alone(group: int) -> None:
    check_batch(Shape(4, kv_heads=1, group=group, dim=8), [(0, 1)], torch.float32)


def test_a_row_of_a_batch_does_not_depend_on_the_others() -> None:
    """Its neighbours change how far tables are padded."""
    torch.manual_seed(3)
    shape = Shape(4, kv_heads=2, group=2, dim=16)
    cache = KvCache(shape.config(), 40, 4, torch.float32, CPU)
    cache.data.normal_()
    short = PlanRow(0, 5, 1, (7, 3), True)
    long = PlanRow(1, 90, 1, tuple(range(10, 33)), True)
    queries = torch.randn(2, shape.heads, shape.dim)
    unused = torch.zeros(2, shape.kv_heads, shape.dim)
    alone = attend(queries[:1], unused[:1], unused[:1], cache, 0, attention_meta((short,), 4, CPU))
    both = attend(queries, unused, unused, cache, 0, attention_meta((short, long), 4, CPU))
    torch.testing.assert_close(both[:1], alone, atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("window", "softcap", "scale"), [(0, 0.0, None), (3, 0.0, 0.7), (0, 1.2, None), (2, 0.8, 1.5)]
)
def test_the_definition_is_softmax_of_scaled_products(
    window: int, softcap: float, scale: float | None
) -> None:
    """Written out number by number."""
    torch.manual_seed(0)
    start, count, heads, kv_heads, dim = 3, 4, 4, 2, 5
    factor = 1 / math.sqrt(dim) if scale is None else scale
    queries = torch.randn(count, heads, dim)
    keys = torch.randn(start + count, kv_heads, dim)
    values = torch.randn(start + count, kv_heads, dim)
    found = attend_dense(
        queries, keys, values, start, scale=scale, window=window, softcap=softcap
    ).view(count, heads, dim)
    for i in range(count):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            last = start + i
            seen = range(max(0, last - window + 1) if window else 0, last + 1)
            scores = {
                j: sum(float(queries[i, head, d] * keys[j, kv_head, d]) for d in range(dim))
                * factor
                for j in seen
            }
            if softcap:
                scores = {j: softcap * math.tanh(s / softcap) for j, s in scores.items()}
            total = sum(math.exp(score) for score in scores.values())
            for d in range(dim):
                expected = sum(
                    math.exp(scores[j]) / total * float(values[j, kv_head, d]) for j in seen
                )
                assert float(found[i, head, d]) == pytest.approx(expected, abs=1e-5)
