"""Attention of single queries against its definition."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.gpu.kernels.attention.decode import decode_attention, decode_launches
from engine.gpu.kernels.attention.paged import Scoring, attend_reference
from tests.kernels.gpu.device import DEVICE, INTERPRETED, TOLERANCE
from tests.kernels.gpu.paged import Paged, paged

LAYER = 1
SPLIT = 32
FP8 = torch.float8_e4m3fn


def lengths_of(rows: list[int]) -> torch.Tensor:
    return torch.tensor(rows, dtype=torch.int32, device=DEVICE)


def random_queries(rows: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(rows, heads, dim).to(dtype)


def check(
    lengths: list[int],
    kv_heads: int,
    group: int,
    dim: int,
    block_size: int,
    dtype: torch.dtype = torch.float32,
    kv: torch.dtype | None = None,
    scoring: Scoring | None = None,
) -> None:
    scoring = scoring or Scoring(dim**-0.5)
    held = paged(lengths, kv_heads, dim, block_size, kv or dtype)
    queries = random_queries(len(lengths), kv_heads * group, dim, dtype)
    found = decode_attention(
        queries.to(DEVICE),
        held.on_device(),
        LAYER,
        held.tables,
        lengths_of(lengths),
        scoring,
        split=SPLIT,
    ).cpu()
    assert found.dtype == dtype
    for row, mapping in enumerate(held.mappings):
        expected = torch.zeros_like(queries[:1], dtype=torch.float32)
        if len(mapping):
            expected = attend_reference(queries[row : row + 1], held.cache, LAYER, mapping, scoring)
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(
            found[row : row + 1].float(), expected, atol=tolerance, rtol=tolerance
        )


ANY = st.fixed_dictionaries(
    {
        "lengths": st.lists(st.integers(0, 140), min_size=1, max_size=4),
        "kv_heads": st.integers(1, 3),
        "group": st.sampled_from((1, 3, 4, 7, 8, 17)),
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
    edges = {
        size * times + more
        for size in (block_size, SPLIT)
        for times in (1, 2)
        for more in (-1, 0, 1)
    }
    check([1, *sorted(edges)], 1, 4, 64, block_size)


@pytest.mark.parametrize("dim", [pytest.param(64, marks=pytest.mark.long), 80, 256])
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
    check([1, 16, 67], 2, 4, dim, 16, dtype, kv)


def test_many_splits() -> None:
    check([17 * SPLIT + 1], 1, 1, 64, 128)


def test_fp8_that_the_gpu_converts() -> None:
    held = paged([40, 7], 2, 64, 16, FP8)
    queries = random_queries(2, 4, 64, torch.float32).to(DEVICE)
    arguments = (
        queries,
        held.on_device(),
        LAYER,
        held.tables,
        lengths_of([40, 7]),
        Scoring(0.1),
    )
    expected = decode_attention(*arguments, split=SPLIT)
    if not INTERPRETED and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("this GPU does not")
    found = torch.empty_like(queries)
    for launch in decode_launches(found, *arguments, None, None, SPLIT, 90):
        launch.run()
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-6)


@pytest.fixture
def many() -> tuple[Paged, torch.Tensor, list[int]]:
    lengths = [1, 31, 32, 33, 70, 100]
    held = paged(lengths, 2, 64, 16, torch.bfloat16)
    return held, random_queries(len(lengths), 6, 64, torch.bfloat16), lengths


def test_rows_that_take_turns_have_the_same_bits(
    many: tuple[Paged, torch.Tensor, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the splits of all rows do not fit the scratch."""
    held, queries, lengths = many
    arguments = (queries.to(DEVICE), held.on_device(), LAYER, held.tables, lengths_of(lengths))
    out = torch.empty_like(arguments[0])
    rest = (Scoring(0.125), None, None, 32, 90)
    assert len(decode_launches(out, *arguments, *rest)) == 2
    together = decode_attention(*arguments, Scoring(0.125), split=32)
    monkeypatch.setattr("engine.gpu.kernels.attention.decode.SCRATCH_BYTES", 1)
    assert len(decode_launches(out, *arguments, *rest)) == 4
    assert torch.equal(decode_attention(*arguments, Scoring(0.125), split=32), together)


@pytest.mark.parametrize("window", [0, 40])
def test_a_row_has_the_same_bits_in_every_batch(
    many: tuple[Paged, torch.Tensor, list[int]], window: int
) -> None:
    held, queries, lengths = many
    cache, scoring = held.on_device(), Scoring(0.125, window)
    together = decode_attention(
        queries.to(DEVICE), cache, LAYER, held.tables, lengths_of(lengths), scoring, split=SPLIT
    )
    for row, length in enumerate(lengths):
        alone = decode_attention(
            queries[row : row + 1].to(DEVICE),
            cache,
            LAYER,
            held.tables[row : row + 1],
            lengths_of([length]),
            scoring,
            # Splits that no row fills change nothing.
            longest=length + row * SPLIT,
            split=SPLIT,
        )
        assert torch.equal(alone[0], together[row])


def test_tokens_of_one_sequence_share_a_table(
    many: tuple[Paged, torch.Tensor, list[int]],
) -> None:
    held, queries, _ = many
    lengths = [95, 96, 97, 98, 99, 100]
    cache = held.on_device()
    found = decode_attention(
        queries.to(DEVICE),
        cache,
        LAYER,
        held.tables,
        lengths_of(lengths),
        Scoring(0.125),
        table_rows=lengths_of([5] * 6),
        split=SPLIT,
    ).cpu()
    expected = attend_reference(queries, held.cache, LAYER, held.mappings[5], Scoring(0.125))
    torch.testing.assert_close(found.float(), expected, atol=2e-2, rtol=2e-2)


def test_what_does_not_fit_is_refused(many: tuple[Paged, torch.Tensor, list[int]]) -> None:
    held, queries, lengths = many
    cache, scoring = held.on_device(), Scoring(0.1)
    queries, counts = queries.to(DEVICE), lengths_of(lengths)
    refused = [
        (queries.float(), held.tables, counts, SPLIT),
        (queries[:, :5], held.tables, counts, SPLIT),
        (queries, held.tables.long(), counts, SPLIT),
        (queries, held.tables, counts.long(), SPLIT),
        (queries, held.tables, counts[1:], SPLIT),
        (queries, held.tables[1:], counts, SPLIT),
        (queries, held.tables, counts, 48),
        (queries.transpose(1, 2), held.tables, counts, SPLIT),
    ]
    for wrong, tables, count, split in refused:
        with pytest.raises(ValueError, match=r"\w"):
            decode_attention(wrong, cache, LAYER, tables, count, scoring, split=split)
    with pytest.raises(ValueError, match="scales"):
        replace(cache, scales=torch.ones(1))
    with pytest.raises(ValueError, match="negative"):
        Scoring(1.0, -1)
