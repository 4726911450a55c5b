"""What both attention kernels do with a tile of keys."""

from __future__ import annotations

import triton
import triton.language as tl

from engine.gpu.kernels.kv_blocks import as_number


@triton.jit  # type: ignore[untyped-decorator]
def slots_of(  # type: ignore[no-untyped-def]
    table, start, end, tile: tl.constexpr, block_size: tl.constexpr
):
    """Tokens ``start …`` of a sequence: their numbers, which are before ``end``, blocks, slots.

    ``start`` is a multiple of ``tile``.
    """
    tokens = start + tl.arange(0, tile)
    inside = tokens < end
    if block_size % tile == 0:
        # One block: one scalar read, and neighbouring rows of one piece of memory.
        block = tl.load(table + start // block_size).to(tl.int64)
        blocks = tl.full((tile,), 0, tl.int64) + block
        slots = start % block_size + tl.arange(0, tile)
    else:
        blocks = tl.load(table + tokens // block_size, mask=inside, other=0).to(tl.int64)
        slots = tokens % block_size
    return tokens, inside, blocks, slots


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(  # type: ignore[no-untyped-def]
    base,
    blocks,
    slots,
    inside,
    stride_block,
    stride_slot,
    tile_dim: tl.constexpr,
    dim: tl.constexpr,
    kind: tl.constexpr,
    dtype: tl.constexpr,
):
    """A tile of keys or values [tile, tile_dim] as ``dtype``; zeros outside."""
    dims = tl.arange(0, tile_dim)
    pointers = base + (blocks * stride_block + slots * stride_slot)[:, None] + dims[None, :]
    inside = inside[:, None]
    if dim != tile_dim:
        inside = inside & (dims < dim)[None, :]
    return as_number(tl.load(pointers, mask=inside, other=0.0), kind, dtype)


@triton.jit  # type: ignore[untyped-decorator]
def key_scores(  # type: ignore[no-untyped-def]
    query,
    keys,
    scales,
    blocks,
    slots,
    inside,
    stride_block,
    stride_slot,
    scale_block,
    scale_slot,
    scale,
    soft_cap,
    tile_dim: tl.constexpr,
    dim: tl.constexpr,
    kind: tl.constexpr,
    capped: tl.constexpr,
):
    """Scores [rows, tile] of a tile of keys, in powers of two: times log2(e)."""
    key = load_tile(
        keys, blocks, slots, inside, stride_block, stride_slot, tile_dim, dim, kind, query.dtype
    )
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if kind != 0:
        factors = tl.load(
            scales + blocks * scale_block + slots * scale_slot, mask=inside, other=0.0
        )
        scores = scores * factors[None, :]
    scores = scores * scale
    if capped:
        # tanh(x) = 2 * sigmoid(2x) - 1
        scores = soft_cap * (2.0 / (1.0 + tl.exp2(scores * (-2.8853900817779268 / soft_cap))) - 1.0)
    return scores * 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def add_values(  # type: ignore[no-untyped-def]
    most,
    total,
    found,
    scores,
    values,
    scales,
    blocks,
    slots,
    inside,
    stride_block,
    stride_slot,
    scale_block,
    scale_slot,
    tile_dim: tl.constexpr,
    dim: tl.constexpr,
    kind: tl.constexpr,
    dtype: tl.constexpr,
    unseen: tl.constexpr,
):
    """A step of the online softmax (Milakov and Gimelshein, 2018): maxima, weights, sums.

    ``unseen`` says that a row may have seen no key yet, and so have no maximum.
    """
    higher = tl.maximum(most, tl.max(scores, axis=1))
    around = higher
    if unseen:
        around = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(most - around)
    weights = tl.exp2(scores - around[:, None])
    total = total * fade + tl.sum(weights, axis=1)
    value = load_tile(
        values, blocks, slots, inside, stride_block, stride_slot, tile_dim, dim, kind, dtype
    )
    if kind != 0:
        factors = tl.load(
            scales + blocks * scale_block + slots * scale_slot, mask=inside, other=0.0
        )
        if dtype == tl.float16:
            # Weights times scales would leave fp16's range.
            value = (value.to(tl.float32) * factors[:, None]).to(dtype)
        else:
            weights = weights * factors[None, :]
    found = tl.dot(weights.to(dtype), value, found * fade[:, None], input_precision="ieee")
    return higher, total, found
