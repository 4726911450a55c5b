"""Paged attention of single queries: split KV (Flash-Decoding, Dao et al., 2023) in two kernels.

Splits have a fixed size and begin at multiples of it. The second kernel adds them in groups of a
fixed size. So a row's sums have the same order whatever else is in the batch. The query heads of a
group are the rows of the matrix products, so that keys and values are read once.
"""

from __future__ import annotations

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

SPLIT = 256
"""Number of keys in a split. A program reads 128 KiB of a bf16 cache with 128 dimensions, and
writes 3 % as much for the second kernel. Smaller splits keep a GPU busier with a single
sequence."""

SCRATCH_BYTES = 1 << 28
"""Maximum bytes of scratch memory for the splits of a launch. Rows that do not fit together are
computed one group after another. A row with a context of 128k needs 8 MiB or more."""
_ROW_STEP = 4

_TILE_NUMBERS = 8192
_COMBINED = 16
_LEAST = 16
"""Minimum size of each side of a matrix product on tensor cores."""


@triton.jit(do_not_specialize=["stride_table", "window", "splits"])  # type: ignore[untyped-decorator]
def decode_kernel(  # type: ignore[no-untyped-def]
    queries,
    data,
    scales,
    tables,
    table_rows,
    lengths,
    partial,
    sums,
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
    splits,
    group: tl.constexpr,
    rows: tl.constexpr,
    dim: tl.constexpr,
    tile_dim: tl.constexpr,
    tile: tl.constexpr,
    split: tl.constexpr,
    block_size: tl.constexpr,
    kind: tl.constexpr,
    mapped: tl.constexpr,
    windowed: tl.constexpr,
    capped: tl.constexpr,
    widen: tl.constexpr,
):
    """Compute one split of one row and KV head: its normalized sums, and the log2 of their
    weights."""
    row = tl.program_id(2).to(tl.int64)
    head = tl.program_id(1)
    length = tl.load(lengths + row)
    begin = 0
    if windowed:
        begin = tl.maximum(length - window, 0)
    number = begin // split + tl.program_id(0)
    low = tl.maximum(number * split, begin // tile * tile)
    high = tl.minimum(number * split + split, length)
    if low < high:
        heads = head * group + tl.arange(0, rows)
        real = tl.arange(0, rows) < group
        dims = tl.arange(0, tile_dim)
        used = real[:, None] & (dims < dim)[None, :]
        query = tl.load(
            queries + row * stride_query + heads[:, None] * stride_query_head + dims[None, :],
            mask=used,
            other=0.0,
        )
        if widen:
            query = query.to(tl.float32)
        table = row
        if mapped:
            table = tl.load(table_rows + row).to(tl.int64)
        pages = pages_of(
            data, scales, head, stride_value, stride_head, scale_value, scale_head, kind
        )
        strides = (stride_block, stride_slot, scale_block, scale_slot)
        scoring = (window, scale, soft_cap)
        shape: tl.constexpr = (tile_dim, dim, kind)
        most = tl.full((rows,), float("-inf"), tl.float32)
        total = tl.zeros((rows,), tl.float32)
        found = tl.zeros((rows, tile_dim), tl.float32)
        for start in range(low, high, tile):
            tokens, place = place_of(tables + table * stride_table, start, high, tile, block_size)
            scores = key_scores(query, pages, place, strides, scoring, shape, capped)
            # Every tile has at least one visible key.
            scores = tl.where((place[2] & (tokens >= begin))[None, :], scores, float("-inf"))
            most, total, found = add_values(
                most, total, found, scores, pages, place, strides, shape, query.dtype, False
            )
        part = (row * tl.num_programs(1) * group + heads) * splits + tl.program_id(0)
        pointers = partial + part[:, None] * dim + dims[None, :]
        tl.store(pointers, found / total[:, None], mask=used)
        tl.store(sums + part, most + tl.log2(total), mask=real)


@triton.jit(do_not_specialize=["window", "splits"])  # type: ignore[untyped-decorator]
def combine_kernel(  # type: ignore[no-untyped-def]
    partial,
    sums,
    lengths,
    out,
    window,
    splits,
    dim: tl.constexpr,
    tile_dim: tl.constexpr,
    split: tl.constexpr,
    tile: tl.constexpr,
    windowed: tl.constexpr,
):
    """Combine the splits of one row and one query head, in order."""
    row = tl.program_id(0).to(tl.int64)
    place = row * tl.num_programs(1) + tl.program_id(1)
    length = tl.load(lengths + row)
    begin = 0
    if windowed:
        begin = tl.maximum(length - window, 0)
    used = (length + split - 1) // split - begin // split
    dims = tl.arange(0, tile_dim)
    some = tl.arange(0, tile)
    highest = tl.full((tile,), float("-inf"), tl.float32)
    for first in range(0, used, tile):
        found = tl.load(
            sums + place * splits + first + some, mask=first + some < used, other=float("-inf")
        )
        highest = tl.maximum(highest, found)
    most = tl.max(highest, axis=0)
    total = 0.0
    result = tl.zeros((tile_dim,), tl.float32)
    for first in range(0, used, tile):
        inside = first + some < used
        at = place * splits + first + some
        weights = tl.exp2(tl.load(sums + at, mask=inside, other=float("-inf")) - most)
        values = tl.load(
            partial + at[:, None] * dim + dims[None, :],
            mask=inside[:, None] & (dims < dim)[None, :],
            other=0.0,
        )
        total += tl.sum(weights, axis=0)
        result += tl.sum(values * weights[:, None], axis=0)
    # A row of length 0 is padding, and gets zeros.
    result = result / tl.where(total > 0, total, 1.0)
    tl.store(out + place * dim + dims, result.to(out.dtype.element_ty), mask=dims < dim)


def decode_attention(
    queries: torch.Tensor,
    blocks: KvBlocks,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scoring: Scoring,
    *,
    longest: int | None = None,
    table_rows: torch.Tensor | None = None,
    split: int = SPLIT,
) -> torch.Tensor:
    """Let each query attend to the first ``lengths`` tokens of its sequence.

    ``queries`` is [rows, heads, dim], fp32, bf16 or fp16. ``tables`` is int32 [tables, blocks].
    ``lengths`` is int32 [rows], 0 for a padding row. ``table_rows`` int32 [rows] maps rows to
    tables (None: each row has its own). ``longest`` is the maximum of the lengths (None: the number
    of tokens that a table can hold). It is a number on the host, so that a captured step keeps its
    grid. The result is contiguous, with the shape and type of the queries; padding rows are zeros.

    A row's result depends only on its own query, tokens and length, bit for bit. This is also true
    for a prompt token that is computed as a row of its own. Raises ValueError if shapes or types do
    not fit.
    """
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    for launch in decode_launches(
        out,
        queries,
        blocks,
        layer,
        tables,
        lengths,
        scoring,
        longest,
        table_rows,
        split,
        capability_of(queries),
    ):
        launch.run()
    return out


def decode_launches(
    out: torch.Tensor,
    queries: torch.Tensor,
    blocks: KvBlocks,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scoring: Scoring,
    longest: int | None,
    table_rows: torch.Tensor | None,
    split: int,
    capability: int,
) -> tuple[Launch, ...]:
    """Describe the kernel launches of ``decode_attention``, for a GPU of compute capability
    ``capability``.

    The rows are divided into groups whose splits fit the scratch memory. There are two launches for
    each group, and all groups use the same scratch memory.
    """
    _check(queries, blocks, tables, lengths, table_rows, split)
    rows, heads, dim = queries.shape
    keys = longest if longest is not None else tables.shape[1] * blocks.block_size
    if scoring.window:
        # A window may begin and end within splits.
        keys = min(keys, scoring.window + split - 1)
    splits = -(-keys // split)
    most = scratch_rows(rows, heads, dim, splits)
    scratch = (
        torch.empty((most, heads, splits, dim), dtype=torch.float32, device=queries.device),
        torch.empty((most, heads, splits), dtype=torch.float32, device=queries.device),
    )
    launches: list[Launch] = []
    for start in range(0, rows, most):
        some = slice(start, start + most)
        launches += _launches(
            out[some],
            queries[some],
            blocks,
            layer,
            tables if table_rows is not None else tables[some],
            lengths[some],
            scoring,
            None if table_rows is None else table_rows[some],
            scratch,
            split,
            capability,
        )
    return tuple(launches)


def scratch_rows(rows: int, heads: int, dim: int, splits: int) -> int:
    """Choose the maximum number of rows that share a launch.

    The splits of these rows fit ``SCRATCH_BYTES``. A few rows share a launch even if their splits
    exceed it.
    """
    fitting = SCRATCH_BYTES // scratch_bytes(1, heads, dim, splits)
    # Whole steps keep each run's lengths aligned; other alignments would compile another kernel.
    return max(1, min(rows, max(1, fitting // _ROW_STEP) * _ROW_STEP))


def scratch_bytes(rows: int, heads: int, dim: int, splits: int) -> int:
    """Compute the scratch memory for the rows of a launch, in bytes: the sums of their splits, and
    the weights of the sums."""
    return 4 * rows * heads * splits * (dim + 1)


def _launches(
    out: torch.Tensor,
    queries: torch.Tensor,
    blocks: KvBlocks,
    layer: int,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    scoring: Scoring,
    table_rows: torch.Tensor | None,
    scratch: tuple[torch.Tensor, torch.Tensor],
    split: int,
    capability: int,
) -> tuple[Launch, Launch]:
    """Describe the two launches for rows whose splits fit the scratch memory."""
    rows, heads, dim = queries.shape
    group = heads // blocks.heads
    partial, sums = scratch
    splits = partial.shape[2]
    kind = blocks.kind(capability)
    tile_dim = max(_LEAST, power_of_two(dim))
    first = Launch(
        decode_kernel,
        (splits, blocks.heads, rows),
        {
            "queries": queries,
            "tables": tables,
            "table_rows": table_rows,
            "lengths": lengths,
            "partial": partial,
            "sums": sums,
            "stride_query": queries.stride(0),
            "stride_query_head": queries.stride(1),
            **blocks.arguments(layer, kind),
            "stride_table": tables.stride(0),
            "window": scoring.window,
            "scale": scoring.scale,
            "soft_cap": scoring.soft_cap,
            "splits": splits,
        },
        {
            "group": group,
            "rows": max(_LEAST, power_of_two(group)),
            "dim": dim,
            "tile_dim": tile_dim,
            "tile": tile_keys(tile_dim, blocks.data.element_size(), split),
            "split": split,
            "block_size": blocks.block_size,
            "kind": kind,
            "mapped": table_rows is not None,
            "windowed": scoring.window > 0,
            "capped": scoring.soft_cap > 0,
            "widen": interpreted(decode_kernel),
        },
        warps=4,
        # One stage for block ids, one for the keys and values that wait for them, twice: two tiles
        # are in flight.
        stages=5,
    )
    second = Launch(
        combine_kernel,
        (rows, heads),
        {
            "partial": partial,
            "sums": sums,
            "lengths": lengths,
            "out": out,
            "window": scoring.window,
            "splits": splits,
        },
        {
            "dim": dim,
            "tile_dim": tile_dim,
            "split": split,
            "tile": _COMBINED,
            "windowed": scoring.window > 0,
        },
        warps=4,
        stages=2,
    )
    return first, second


def tile_keys(tile_dim: int, itemsize: int, split: int) -> int:
    """Choose the number of keys in a tile. With 16-bit numbers, a tile has 16 KiB of keys and 16
    KiB of values, and shared memory holds two tiles."""
    numbers = _TILE_NUMBERS // 2 if itemsize == 4 else _TILE_NUMBERS
    return min(max(_LEAST, numbers // tile_dim), 128, split)


def _check(
    queries: torch.Tensor,
    blocks: KvBlocks,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    table_rows: torch.Tensor | None,
    split: int,
) -> None:
    rows = len(queries)
    check_queries(queries, blocks, tables)
    if split < _LEAST or split != power_of_two(split):
        raise ValueError("a split must be a power of two of at least 16 keys")
    for name, tensor in (("tables", tables), ("lengths", lengths), ("table_rows", table_rows)):
        if tensor is not None and tensor.dtype != torch.int32:
            raise ValueError(f"{name} must be int32")
    if lengths.shape != (rows,) or not lengths.is_contiguous():
        raise ValueError(f"lengths must be contiguous, one for each of {rows} rows")
    if table_rows is not None and (table_rows.shape != (rows,) or not table_rows.is_contiguous()):
        raise ValueError(f"table_rows must be contiguous, one for each of {rows} rows")
    if table_rows is None and tables.shape[0] != rows:
        raise ValueError(f"there are {tables.shape[0]} block tables for {rows} rows")
