"""Attention of prompt chunks over the paged KV cache: causal FlashAttention-2 (Dao, 2023).

One launch computes the chunks of many sequences. Their keys are in the cache already, including the
chunk's own. The query heads of a group share a tile of rows, so that each key is read only once for
the group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.attention.paged import (
    Scoring,
    add_values,
    check_queries,
    key_scores,
    pages_of,
    place_of,
)
from engine.gpu.kernels.kv_blocks import KvBlocks
from engine.gpu.kernels.launch import (
    Launch,
    capability_of,
    interpreted,
    power_of_two,
)

MAX_TILE_ROWS = 128
"""Maximum rows of a tile: number of tokens times the query heads of a KV head."""

_LEAST = 16
_ASYNCHRONOUS_PRODUCTS = 90
"""Compute capability from which tensor cores read their operands from shared memory, which leaves
registers free."""


@triton.jit  # type: ignore[untyped-decorator]
def _attend_range(  # type: ignore[no-untyped-def]
    most,
    total,
    found,
    query,
    position,
    pages,
    table,
    low,
    high,
    end,
    strides,
    scoring,
    shape,
    tile: tl.constexpr,
    block_size: tl.constexpr,
    masked: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
):
    """Compute online softmax over the keys ``low ... high`` for a tile of rows."""
    for start in range(low, high, tile):
        tokens, place = place_of(table, start, end, tile, block_size)
        scores = key_scores(query, pages, place, strides, scoring, shape, capped)
        if masked:
            seen = tokens[None, :] <= position[:, None]
            if windowed:
                seen = seen & (tokens[None, :] > position[:, None] - scoring[0])
            scores = tl.where(seen, scores, float("-inf"))
        most, total, found = add_values(
            most, total, found, scores, pages, place, strides, shape, query.dtype, windowed
        )
    return most, total, found


@triton.jit(do_not_specialize=["stride_table", "window"])  # type: ignore[untyped-decorator]
def chunk_kernel(  # type: ignore[no-untyped-def]
    queries,
    data,
    scales,
    tables,
    query_starts,
    contexts,
    out,
    stride_query,
    stride_query_head,
    stride_block,
    stride_value,
    stride_head,
    stride_slot,
    scale_block,
    scale_value,
    scale_head,
    scale_slot,
    stride_table,
    window,
    scale,
    soft_cap,
    group: tl.constexpr,
    rows: tl.constexpr,
    dim: tl.constexpr,
    tile_dim: tl.constexpr,
    tile: tl.constexpr,
    block_size: tl.constexpr,
    kind: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute attention for a tile of rows (each a token and a head) of one sequence and one KV
    head."""
    sequence = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    # The last rows come first, because they see the most keys.
    number = tl.num_programs(0) - 1 - tl.program_id(0)
    begin = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - begin
    if number * rows < count * group:
        context = tl.load(contexts + sequence)
        row = number * rows + tl.arange(0, rows)
        token = row // group
        dims = tl.arange(0, tile_dim)
        used = (token < count)[:, None] & (dims < dim)[None, :]
        place = (begin + token).to(tl.int64)
        heads = head * group + row % group
        query = tl.load(
            queries + (place * stride_query + heads * stride_query_head)[:, None] + dims[None, :],
            mask=used,
            other=0.0,
        )
        if widen:
            query = query.to(tl.float32)
        position = context + token
        first = number * rows // group
        last = tl.minimum((number * rows + rows - 1) // group, count - 1)
        end = context + last + 1
        pages = pages_of(
            data, scales, head, stride_value, stride_head, scale_value, scale_head, kind
        )
        strides = (stride_block, stride_slot, scale_block, scale_slot)
        scoring = (window, scale, soft_cap)
        shape: tl.constexpr = (tile_dim, dim, kind)
        table = tables + sequence * stride_table
        most = tl.full((rows,), float("-inf"), tl.float32)
        total = tl.zeros((rows,), tl.float32)
        found = tl.zeros((rows, tile_dim), tl.float32)
        if windowed:
            middle = tl.maximum(context + first + 1 - window, 0) // tile * tile
        else:
            # Up to here, every row sees every key.
            middle = (context + first + 1) // tile * tile
            most, total, found = _attend_range(
                most,
                total,
                found,
                query,
                position,
                pages,
                table,
                0,
                middle,
                end,
                strides,
                scoring,
                shape,
                tile,
                block_size,
                False,
                False,
                capped,
            )
        most, total, found = _attend_range(
            most,
            total,
            found,
            query,
            position,
            pages,
            table,
            middle,
            end,
            end,
            strides,
            scoring,
            shape,
            tile,
            block_size,
            True,
            windowed,
            capped,
        )
        # Rows past the chunk's end may have seen no key.
        found = found / tl.where(total > 0, total, 1.0)[:, None]
        target = out + ((place * tl.num_programs(1) * group + heads) * dim)[:, None] + dims[None, :]
        tl.store(target, found.to(out.dtype.element_ty), mask=used)


def chunk_attention(
    queries: torch.Tensor,
    blocks: KvBlocks,
    layer: int,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    contexts: torch.Tensor,
    scoring: Scoring,
    *,
    longest: int,
) -> torch.Tensor:
    """Let each token of each sequence's chunk attend to the tokens before it and to itself.

    ``queries`` is [tokens, heads, dim], fp32, bf16 or fp16, one chunk after another. ``tables`` is
    int32 [sequences, blocks]. ``query_starts`` int32 [sequences + 1] has the index of each chunk's
    first query, and last the number of queries. ``contexts`` int32 [sequences] is the number of
    tokens before each chunk. ``longest`` is the maximum number of tokens in a chunk. The result is
    contiguous, with the shape and type of the queries.

    Each row's sum goes through its keys in order, in tiles that begin at multiples of their size.
    The tiles' size depends on ``longest``, up to ``MAX_TILE_ROWS`` rows (tokens times the heads of
    a group). If ``longest`` fills a tile, a row's bits do not depend on how a prompt is cut, or on
    other rows. Raises ValueError if shapes or types do not fit.
    """
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    chunk_launch(
        out,
        queries,
        blocks,
        layer,
        tables,
        query_starts,
        contexts,
        scoring,
        longest,
        capability_of(queries),
    ).run()
    return out


@dataclass(frozen=True, slots=True)
class _Tiles:
    rows: int
    keys: int
    warps: int
    stages: int


def _tiles(tile_dim: int, itemsize: int, rows: int, capability: int) -> _Tiles:
    """Choose tile sizes that fit the registers without spilling, and for which shared memory holds
    two tiles of keys and values."""
    if itemsize == 4:
        return _Tiles(min(rows, 64), 32 if tile_dim <= 128 else 16, 4, 2)
    if capability < _ASYNCHRONOUS_PRODUCTS:
        return _Tiles(min(rows, 64), 32, 4 if tile_dim <= 128 else 8, 4)
    if tile_dim <= 64:
        return _Tiles(min(rows, MAX_TILE_ROWS), 64, 4, 4)
    warps = 8 if rows >= MAX_TILE_ROWS else 4
    return _Tiles(min(rows, MAX_TILE_ROWS), 64 if tile_dim <= 128 else 32, warps, 4)


def chunk_launch(
    out: torch.Tensor,
    queries: torch.Tensor,
    blocks: KvBlocks,
    layer: int,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    contexts: torch.Tensor,
    scoring: Scoring,
    longest: int,
    capability: int,
) -> Launch:
    """Describe the kernel launch of ``chunk_attention``, for a GPU of compute capability
    ``capability``."""
    _check(queries, blocks, tables, query_starts, contexts)
    _, heads, dim = queries.shape
    group = heads // blocks.heads
    tile_dim = max(_LEAST, power_of_two(dim))
    most = power_of_two(longest * group)
    tiles = _tiles(tile_dim, queries.element_size(), max(_LEAST, most), capability)
    kind = blocks.kind(capability)
    return Launch(
        chunk_kernel,
        (-(-longest * group // tiles.rows), blocks.heads, len(contexts)),
        {
            "queries": queries,
            "tables": tables,
            "query_starts": query_starts,
            "contexts": contexts,
            "out": out,
            "stride_query": queries.stride(0),
            "stride_query_head": queries.stride(1),
            **blocks.arguments(layer, kind),
            "stride_table": tables.stride(0),
            "window": scoring.window,
            "scale": scoring.scale,
            "soft_cap": scoring.soft_cap,
        },
        {
            "group": group,
            "rows": tiles.rows,
            "dim": dim,
            "tile_dim": tile_dim,
            "tile": tiles.keys,
            "block_size": blocks.block_size,
            "kind": kind,
            "windowed": scoring.window > 0,
            "capped": scoring.soft_cap > 0,
            "widen": interpreted(chunk_kernel),
        },
        warps=tiles.warps,
        stages=tiles.stages,
        # Masked and unmasked tiles are two loops: a key must count the same in both.
        fusion=False,
    )


def _check(
    queries: torch.Tensor,
    blocks: KvBlocks,
    tables: torch.Tensor,
    query_starts: torch.Tensor,
    contexts: torch.Tensor,
) -> None:
    check_queries(queries, blocks, tables)
    sequences = len(contexts)
    if len(query_starts) != sequences + 1 or tables.shape[0] != sequences:
        raise ValueError(
            f"{sequences} contexts need {sequences} tables and {sequences + 1} query starts"
        )
    named = (("tables", tables), ("query_starts", query_starts), ("contexts", contexts))
    for name, tensor in named:
        if tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32")
    if not (query_starts.is_contiguous() and contexts.is_contiguous()):
        raise ValueError("query_starts and contexts must be contiguous")
