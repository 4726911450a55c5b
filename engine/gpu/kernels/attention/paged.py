"""Paged attention: the reference in plain torch, and functions that kernels apply to a tile of
keys.

The kernels' functions take several numbers as one tuple:

    place    (blocks, slots, inside) of the tile's tokens: where each is, and whether it counts
    pages    (keys, values, key scales, value scales) of one KV head: where they begin
    strides  (of a block, of a slot, of a block's scales, of a slot's scale)
    scoring  (window, scale, soft cap)
    shape    (dimensions of the tile, dimensions of a head, kind of the blocks), all constants
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.kv_blocks import PLAIN, KvBlocks, as_number, dequantize
from engine.gpu.kernels.launch import check_strides


@dataclass(frozen=True, slots=True)
class Scoring:
    """How attention scores are computed from the products of queries and keys.

    ``scale`` multiplies the products. ``window`` is the maximum number of keys that a query sees,
    including its own token's (0: all). ``soft_cap`` c > 0 turns a score s into c * tanh(s / c)
    (Gemma 2, 2024).
    """

    scale: float
    window: int = 0
    soft_cap: float = 0.0

    def __post_init__(self) -> None:
        if self.window < 0 or self.soft_cap < 0:
            raise ValueError("window and soft_cap cannot be negative")


def attend_reference(
    queries: torch.Tensor, blocks: KvBlocks, layer: int, table: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Let the last ``count`` tokens of one sequence attend to the sequence: fp32 [count, heads,
    dim].

    ``queries`` is [count, heads, dim]; ``table`` [tokens] is the sequence's slot mapping, int64
    (block * block_size + slot of each of its tokens).
    """
    count, heads, _ = queries.shape
    values = dequantize(blocks)[:, layer].transpose(2, 3)[table // blocks.block_size]
    picked = values.gather(
        2, (table % blocks.block_size).view(-1, 1, 1, 1, 1).expand(-1, 2, 1, *values.shape[3:])
    )[:, :, 0]
    key, value = (
        picked[:, which].repeat_interleave(heads // blocks.heads, dim=1) for which in (0, 1)
    )
    scores = torch.einsum("qhd,khd->hqk", queries.float(), key) * scoring.scale
    if scoring.soft_cap:
        scores = scoring.soft_cap * torch.tanh(scores / scoring.soft_cap)
    tokens = len(table)
    position = torch.arange(tokens - count, tokens, device=queries.device)[:, None]
    other = torch.arange(tokens, device=queries.device)
    hidden = other > position
    if scoring.window:
        hidden |= other <= position - scoring.window
    weights = scores.masked_fill(hidden, -math.inf).softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


def slot_mapping(table: list[int], tokens: int, block_size: int) -> torch.Tensor:
    """Compute the slots of the first ``tokens`` tokens of a block table: int64 [tokens]."""
    position = torch.arange(tokens)
    return torch.tensor(table)[position // block_size] * block_size + position % block_size


@triton.jit  # type: ignore[untyped-decorator]
def pages_of(  # type: ignore[no-untyped-def]
    data, scales, head, stride_value, stride_head, scale_value, scale_head, kind: tl.constexpr
):
    """Compute the tuple ``pages`` of one KV head; if there are no scales, their entries are not
    used."""
    keys = data + head.to(tl.int64) * stride_head
    values = keys + stride_value
    key_scales = keys
    value_scales = values
    if kind != 0:
        key_scales = scales + head.to(tl.int64) * scale_head
        value_scales = key_scales + scale_value
    return keys, values, key_scales, value_scales


@triton.jit  # type: ignore[untyped-decorator]
def place_of(  # type: ignore[no-untyped-def]
    table, start, end, tile: tl.constexpr, block_size: tl.constexpr
):
    """Compute the positions of a tile of tokens from ``start`` on, and the tuple ``place`` of those
    before ``end``.

    ``start`` is a multiple of ``tile``.
    """
    tokens = start + tl.arange(0, tile)
    inside = tokens < end
    if block_size % tile == 0:
        # All in one block: one scalar read, and adjacent rows of memory.
        block = tl.load(table + start // block_size).to(tl.int64)
        blocks = tl.full((tile,), 0, tl.int64) + block
        slots = start % block_size + tl.arange(0, tile)
    else:
        blocks = tl.load(table + tokens // block_size, mask=inside, other=0).to(tl.int64)
        slots = tokens % block_size
    return tokens, (blocks, slots, inside)


@triton.jit  # type: ignore[untyped-decorator]
def load_tile(base, place, strides, shape, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a tile of keys or values [tile, dimensions] as ``dtype``, with zeros for tokens that
    ``place`` marks as not counting."""
    blocks, slots, inside = place
    dims = tl.arange(0, shape[0])
    pointers = base + (blocks * strides[0] + slots * strides[1])[:, None] + dims[None, :]
    inside = inside[:, None]
    if shape[1] != shape[0]:
        inside = inside & (dims < shape[1])[None, :]
    return as_number(tl.load(pointers, mask=inside, other=0.0), shape[2], dtype)


@triton.jit
def _load_scales(base, place, strides):  # type: ignore[no-untyped-def]
    blocks, slots, inside = place
    return tl.load(base + blocks * strides[2] + slots * strides[3], mask=inside, other=0.0)


@triton.jit  # type: ignore[untyped-decorator]
def key_scores(  # type: ignore[no-untyped-def]
    query, pages, place, strides, scoring, shape, capped: tl.constexpr
):
    """Compute the scores [rows, tile] of a tile of keys. They are multiplied by log2(e), for use
    with powers of two."""
    key = load_tile(pages[0], place, strides, shape, query.dtype)
    scores = tl.dot(query, tl.trans(key), input_precision="ieee")
    if shape[2] != 0:
        scores = scores * _load_scales(pages[2], place, strides)[None, :]
    scores = scores * scoring[1]
    if capped:
        # tanh(x) = 2 * sigmoid(2x) - 1
        soft_cap = scoring[2]
        scores = soft_cap * (2.0 / (1.0 + tl.exp2(scores * (-2.8853900817779268 / soft_cap))) - 1.0)
    return scores * 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def add_values(  # type: ignore[no-untyped-def]
    most,
    total,
    found,
    scores,
    pages,
    place,
    strides,
    shape,
    dtype: tl.constexpr,
    unseen: tl.constexpr,
):
    """Add a tile of values in a step of the online softmax (Milakov and Gimelshein, 2018). Updates
    maxima, weights and sums.

    ``unseen``: true if there may be rows without any key so far, which have no maximum yet.
    """
    higher = tl.maximum(most, tl.max(scores, axis=1))
    around = higher
    if unseen:
        around = tl.where(higher == float("-inf"), 0.0, higher)
    fade = tl.exp2(most - around)
    weights = tl.exp2(scores - around[:, None])
    total = total * fade + tl.sum(weights, axis=1)
    value = load_tile(pages[1], place, strides, shape, dtype)
    if shape[2] != 0:
        factors = _load_scales(pages[3], place, strides)
        if dtype == tl.float16:
            # Weights times scales would exceed fp16's range.
            value = (value.to(tl.float32) * factors[:, None]).to(dtype)
        else:
            weights = weights * factors[None, :]
    found = tl.dot(weights.to(dtype), value, found * fade[:, None], input_precision="ieee")
    return higher, total, found


def check_queries(queries: torch.Tensor, blocks: KvBlocks, tables: torch.Tensor) -> None:
    """Raise ValueError if the queries' shape or type does not fit the blocks, or strides are not
    supported."""
    _, heads, dim = queries.shape
    check_strides(queries, "queries")
    check_strides(tables, "block tables")
    if heads % blocks.heads or dim != blocks.dim:
        raise ValueError(
            f"{heads} query heads of {dim} do not fit {blocks.heads} KV heads of {blocks.dim}"
        )
    if blocks.kind(0) == PLAIN and blocks.data.dtype != queries.dtype:
        raise ValueError(f"queries are {queries.dtype} and KV blocks {blocks.data.dtype}")
