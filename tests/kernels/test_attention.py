"""Paged attention against its definition, and the definition against loops over numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import attend, attend_dense, attention_meta
from engine.kv_cache import KvCache
from engine.model_config import ModelConfig
from engine.plan import PlanRow

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
        return ModelConfig(
            vocab_size=8,
            hidden_size=hidden,
            intermediate_size=8,
            layers=LAYERS,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.dim,
            context_length=4096,
            rms_norm_eps=1e-5,
            rope_theta=10000.0,
            rope_scaling=None,
            tied_embeddings=True,
            eos_ids=(),
        )


def check_batch(
    shape: Shape, spans: list[tuple[int, int]], dtype: torch.dtype, seed: int = 0
) -> None:
    """One batch of sequences, each with ``(start, count)``, in blocks scattered over the cache."""
    torch.manual_seed(seed)
    size = shape.block_size
    needed = [-(-(start + count) // size) for start, count in spans]
    cache = KvCache(shape.config(), sum(needed) + 3, size, dtype, CPU)
    cache.data.fill_(GARBAGE)
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
        )
        expected = torch.cat(
            [
                attend_dense(query, key + layer, value - layer, start)
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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block_size", [1, 16, 32])
def test_half_precision_is_near_the_definition(block_size: int, dtype: torch.dtype) -> None:
    shape = Shape(block_size, kv_heads=3, group=3, dim=64)
    check_batch(shape, [(0, 40), (33, 1), (16, 17), (0, 1), (31, 1)], dtype)


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


def test_the_definition_is_softmax_of_scaled_products() -> None:
    """Written out number by number."""
    torch.manual_seed(0)
    start, count, heads, kv_heads, dim = 3, 4, 4, 2, 5
    queries = torch.randn(count, heads, dim)
    keys = torch.randn(start + count, kv_heads, dim)
    values = torch.randn(start + count, kv_heads, dim)
    found = attend_dense(queries, keys, values, start).view(count, heads, dim)
    for i in range(count):
        for head in range(heads):
            kv_head = head // (heads // kv_heads)
            seen = range(start + i + 1)
            scores = [
                sum(float(queries[i, head, d] * keys[j, kv_head, d]) for d in range(dim))
                / math.sqrt(dim)
                for j in seen
            ]
            total = sum(math.exp(score) for score in scores)
            for d in range(dim):
                expected = sum(
                    math.exp(scores[j]) / total * float(values[j, kv_head, d]) for j in seen
                )
                assert float(found[i, head, d]) == pytest.approx(expected, abs=1e-5)
