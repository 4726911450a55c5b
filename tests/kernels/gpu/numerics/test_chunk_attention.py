"""Attention of prompts' chunks against its definition."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gpu.kernels.attention.chunk import MAX_TILE_ROWS, chunk_attention
from engine.gpu.kernels.attention.paged import Scoring, attend_reference
from tests.kernels.gpu.device import DEVICE, INTERPRETED, TOLERANCE
from tests.kernels.gpu.paged import paged

LAYER = 1
FP8 = torch.float8_e4m3fn


def check(
    spans: list[tuple[int, int]],
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    kv: torch.dtype | None = None,
    scoring: Scoring | None = None,
) -> None:
    """One launch of chunks, each ``(tokens before, tokens)``."""
    scoring = scoring or Scoring(dim**-0.5)
    held = paged(
        [before + count for before, count in spans], kv_heads, dim, block_size, kv or dtype
    )
    counts = [count for _, count in spans]
    starts = torch.tensor([0, *counts]).cumsum(0)
    queries = torch.randn(sum(counts), kv_heads * group, dim).to(dtype)
    found = chunk_attention(
        queries.to(DEVICE),
        held.on_device(),
        LAYER,
        held.tables,
        starts.int().to(DEVICE),
        torch.tensor([before for before, _ in spans], dtype=torch.int32, device=DEVICE),
        scoring,
        longest=max(counts),
    ).cpu()
    assert found.dtype == dtype
    tolerance = TOLERANCE[dtype]
    for first, count, mapping in zip(starts.tolist(), counts, held.mappings, strict=False):
        if count:
            rows = slice(first, first + count)
            torch.testing.assert_close(
                found[rows].float(),
                attend_reference(queries[rows], held.cache, LAYER, mapping, scoring),
                atol=tolerance,
                rtol=tolerance,
            )


ANY = st.fixed_dictionaries(
    {
        "spans": st.lists(
            st.tuples(st.integers(0, 70), st.integers(1, 40)), min_size=1, max_size=3
        ),
        "kv_heads": st.integers(1, 2),
        "group": st.sampled_from((1, 3, 4, 7, 8)),
        "dim": st.sampled_from((64, 80, 96, 128)),
        "block_size": st.sampled_from((16, 32, 64, 128)),
        "window": st.sampled_from((0, 0, 1, 5, 33, 64)),
        "soft_cap": st.sampled_from((0.0, 2.0)),
    }
)


def check_any(case: dict[str, Any]) -> None:
    window, soft_cap = case.pop("window"), case.pop("soft_cap")
    check(**case, scoring=Scoring(case["dim"] ** -0.5, window, soft_cap))


@settings(max_examples=8, deadline=None, derandomize=True)
@given(ANY)
def test_any_batch_attends_as_the_definition_says(case: dict[str, Any]) -> None:
    check_any(case)


@pytest.mark.long
@pytest.mark.timeout(600)
@settings(max_examples=100, deadline=None)
@given(ANY)
def test_many_batches_attend_as_the_definition_says(case: dict[str, Any]) -> None:
    check_any(case)


@pytest.mark.parametrize("block_size", [16, 64])
def test_around_every_boundary(block_size: int) -> None:
    ends = (block_size - 1, block_size, block_size + 1)
    check([(0, end) for end in ends], 1, 2, 64, block_size)
    check([(end, 2) for end in ends], 1, 2, 64, block_size)
    check([(end - 2, 1) for end in ends], 1, 2, 64, block_size)


@pytest.mark.parametrize("dim", [80, 256])
@pytest.mark.parametrize(
    ("dtype", "kv"),
    [
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
        (torch.bfloat16, FP8),
        (torch.float16, torch.int8),
    ],
)
def test_every_type_and_head_size(dim: int, dtype: torch.dtype, kv: torch.dtype) -> None:
    check([(0, 33), (37, 20), (5, 1)], 1, 4, dim, 16, dtype, kv)


def test_chunks_of_several_tiles_and_of_nothing() -> None:
    check([(0, 150), (200, 0), (129, 97)], 1, 3, 64, 16)


def test_what_does_not_fit_is_refused() -> None:
    held = paged([20, 20], 2, 64, 16, torch.float16)
    cache, scoring = held.on_device(), Scoring(0.1)
    queries = torch.zeros(12, 4, 64, dtype=torch.float16, device=DEVICE)
    starts = torch.tensor([0, 4, 12], dtype=torch.int32, device=DEVICE)
    before = torch.tensor([16, 12], dtype=torch.int32, device=DEVICE)
    refused = [
        (queries.float(), held.tables, starts, before),
        (queries[:, :3], held.tables, starts, before),
        (queries, held.tables[1:], starts, before),
        (queries, held.tables, starts[1:], before),
        (queries, held.tables, starts.long(), before),
        (queries, held.tables, starts, before.long()),
        (queries[..., ::2], held.tables, starts, before),
    ]
    for wrong, tables, begin, context in refused:
        with pytest.raises(ValueError, match=r"\w"):
            chunk_attention(wrong, cache, LAYER, tables, begin, context, scoring, longest=8)


@pytest.mark.parametrize("window", [0, 40])
def test_bits_do_not_depend_on_how_a_prompt_is_cut(window: int) -> None:
    tokens, full = 120, MAX_TILE_ROWS
    held = paged([tokens], 1, 64, 16, torch.bfloat16)
    cache, queries = held.on_device(), torch.randn(tokens, 2, 64).bfloat16().to(DEVICE)
    scoring = Scoring(0.125, window)

    def computed(first: int, end: int) -> torch.Tensor:
        starts = torch.tensor([0, end - first], dtype=torch.int32, device=DEVICE)
        before = torch.tensor([first], dtype=torch.int32, device=DEVICE)
        return chunk_attention(
            queries[first:end], cache, LAYER, held.tables, starts, before, scoring, longest=full
        )

    whole = computed(0, tokens)
    for cut in (1, 63, 64, 65, 119):
        found = torch.cat([computed(0, cut), computed(cut, tokens)])
        # The interpreter's products are numpy's, where a row's place among others shows.
        assert INTERPRETED or torch.equal(found, whole)
        torch.testing.assert_close(found, whole, atol=1e-2, rtol=1e-2)
