"""Rotates queries and keys, and writes keys and values to the cache, in one kernel.

RoFormer (Su et al., 2021): the halves of a head are rotated against each other, as in
``engine.model.rope.apply_rope``. Optionally each head's RMSNorm is applied first (QK norm: Qwen3,
Gemma 3). Keys and values are quantized if the cache is.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.kv_blocks import FP8, FP8_BITS, KvBlocks, encode, quantize, scale_of
from engine.gpu.kernels.launch import Launch, check_strides, power_of_two

_HEADS = 8
"""Number of heads that a program computes: with 128 dimensions each, 8 numbers for each of its 128
threads."""


@triton.jit
def _sum_squares(x):  # type: ignore[no-untyped-def]
    return tl.sum(x * x, axis=1)


# ``parts`` of some heads are the halves that are rotated against each other and the rest, fp32;
# ``shape`` is (half, its tile, dimensions of a head, the tile of the rest), all constants.


@triton.jit
def _load_parts(source, inside, shape):  # type: ignore[no-untyped-def]
    """Load the parts of some heads, from pointers [heads, 1]."""
    half: tl.constexpr = shape[0]
    tile_half: tl.constexpr = shape[1]
    dim: tl.constexpr = shape[2]
    tile_rest: tl.constexpr = shape[3]
    at = tl.arange(0, tile_half)[None, :]
    some = inside[:, None] & (at < half)
    first = tl.load(source + at, mask=some, other=0.0).to(tl.float32)
    second = tl.load(source + half + at, mask=some, other=0.0).to(tl.float32)
    after = 2 * half + tl.arange(0, tile_rest)[None, :]
    rest = first
    if 2 * half < dim:
        rest = tl.load(source + after, mask=inside[:, None] & (after < dim), other=0.0).to(
            tl.float32
        )
    return first, second, rest


@triton.jit  # type: ignore[untyped-decorator]
def _turn(parts, weight, eps, turn, shape, normed: tl.constexpr):  # type: ignore[no-untyped-def]
    """Normalize the parts of some heads if requested, and rotate them; ``turn`` has cosines and
    sines."""
    first, second, rest = parts
    cos, sin = turn
    half: tl.constexpr = shape[0]
    tile_half: tl.constexpr = shape[1]
    dim: tl.constexpr = shape[2]
    tile_rest: tl.constexpr = shape[3]
    at = tl.arange(0, tile_half)
    after = 2 * half + tl.arange(0, tile_rest)
    if normed:
        squares = _sum_squares(first) + _sum_squares(second)
        if 2 * half < dim:
            squares += _sum_squares(rest)
        factor = tl.rsqrt(squares / dim + eps)[:, None]
        first *= factor * tl.load(weight + at, mask=at < half, other=0.0)[None, :]
        second *= factor * tl.load(weight + half + at, mask=at < half, other=0.0)[None, :]
        if 2 * half < dim:
            rest *= factor * tl.load(weight + after, mask=after < dim, other=0.0)[None, :]
    return first * cos - second * sin, second * cos + first * sin, rest


@triton.jit  # type: ignore[untyped-decorator]
def _store_kv(  # type: ignore[no-untyped-def]
    target, scale_target, inside, parts, shape, kind: tl.constexpr
):
    """Store one token's keys or values of some heads in the cache: codes, and scales for kinds that
    have them."""
    first, second, rest = parts
    half: tl.constexpr = shape[0]
    tile_half: tl.constexpr = shape[1]
    dim: tl.constexpr = shape[2]
    tile_rest: tl.constexpr = shape[3]
    at = tl.arange(0, tile_half)[None, :]
    some = inside[:, None] & (at < half)
    after = 2 * half + tl.arange(0, tile_rest)[None, :]
    scale = tl.full((first.shape[0],), 1.0, tl.float32)
    if kind != 0:
        most = tl.maximum(tl.max(tl.abs(first), axis=1), tl.max(tl.abs(second), axis=1))
        if 2 * half < dim:
            most = tl.maximum(most, tl.max(tl.abs(rest), axis=1))
        scale = scale_of(most, kind)
        tl.store(scale_target, scale, mask=inside)
    element = target.dtype.element_ty
    tl.store(target[:, None] + at, encode(first, scale, kind, element), mask=some)
    tl.store(target[:, None] + half + at, encode(second, scale, kind, element), mask=some)
    if 2 * half < dim:
        tl.store(
            target[:, None] + after,
            encode(rest, scale, kind, element),
            mask=inside[:, None] & (after < dim),
        )


@triton.jit  # type: ignore[untyped-decorator]
def rope_cache_kernel(  # type: ignore[no-untyped-def]
    queries,
    keys,
    values,
    out,
    data,
    scales,
    table,
    positions,
    slots,
    query_weight,
    key_weight,
    eps,
    stride_query,
    stride_key,
    stride_value_token,
    stride_block,
    stride_value,
    stride_head,
    stride_slot,
    scale_block,
    scale_value,
    scale_head,
    scale_slot,
    heads: tl.constexpr,
    kv_heads: tl.constexpr,
    tile: tl.constexpr,
    dim: tl.constexpr,
    half: tl.constexpr,
    tile_half: tl.constexpr,
    tile_rest: tl.constexpr,
    block_size: tl.constexpr,
    kind: tl.constexpr,
    normed: tl.constexpr,
):
    """Process some heads of one token: rotate queries, or rotate and store keys and store
    values."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    query_parts: tl.constexpr = (heads + tile - 1) // tile
    at = tl.arange(0, tile_half)
    angles = table + tl.load(positions + token).to(tl.int64) * (2 * half) + at
    cos = tl.load(angles, mask=at < half, other=0.0)[None, :]
    sin = tl.load(angles + half, mask=at < half, other=0.0)[None, :]
    turn = (cos, sin)
    shape: tl.constexpr = (half, tile_half, dim, tile_rest)
    if part < query_parts:
        head = part * tile + tl.arange(0, tile)
        inside = head < heads
        parts = _load_parts(queries + token * stride_query + head[:, None] * dim, inside, shape)
        parts = _turn(parts, query_weight, eps, turn, shape, normed)
        target = out + (token * heads + head) * dim
        _store_kv(target, target, head < heads, parts, shape, 0)
    else:
        head = (part - query_parts) * tile + tl.arange(0, tile)
        slot = tl.load(slots + token)
        # A padding row has no slot.
        inside = head < tl.where(slot >= 0, kv_heads, 0)
        block = slot // block_size
        offset = head.to(tl.int64) * stride_head + block * stride_block
        offset += slot % block_size * stride_slot
        scale_target = scales
        if kind != 0:
            scale_target = scales + head.to(tl.int64) * scale_head + block * scale_block
            scale_target += slot % block_size * scale_slot
        parts = _load_parts(keys + token * stride_key + head[:, None] * dim, inside, shape)
        parts = _turn(parts, key_weight, eps, turn, shape, normed)
        _store_kv(data + offset, scale_target, inside, parts, shape, kind)
        parts = _load_parts(
            values + token * stride_value_token + head[:, None] * dim, inside, shape
        )
        if kind != 0:
            scale_target += scale_value
        _store_kv(data + offset + stride_value, scale_target, inside, parts, shape, kind)


def rope_cache(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: KvBlocks,
    layer: int,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Rotate queries and keys; write the rotated keys and the values to ``slots`` of the blocks.

    Returns the rotated queries, contiguous. ``queries`` is [tokens, heads, dim], ``keys`` and
    ``values`` are [tokens, kv_heads, dim], all of one float type. The heads of a token are
    adjacent, so that they may be parts of one projection. ``table`` is fp32 [positions, 2, rotated
    / 2], contiguous: cosines and sines; dimensions from ``rotated`` on are unchanged. ``positions``
    [tokens] is int32 or int64. ``slots`` int64 [tokens] is the slot mapping (block * block_size +
    slot), -1 for a padding row, which writes nothing. ``query_weight`` and ``key_weight``, fp32
    [dim], normalize each head first, if they are given. Computed in fp32 and rounded once. Raises
    ValueError if shapes or types do not fit.
    """
    out = torch.empty(queries.shape, dtype=queries.dtype, device=queries.device)
    rope_cache_launch(
        out,
        queries,
        keys,
        values,
        blocks,
        layer,
        table,
        positions,
        slots,
        query_weight,
        key_weight,
        eps,
    ).run()
    return out


def rope_cache_launch(
    out: torch.Tensor,
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: KvBlocks,
    layer: int,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
    eps: float,
) -> Launch:
    """Describe the kernel launch that computes ``rope_cache``; the rotated queries go to
    ``out``."""
    _check(queries, keys, values, blocks, table, positions, slots, query_weight, key_weight)
    tokens, heads, dim = queries.shape
    kv_heads = keys.shape[1]
    half = table.shape[2]
    # Codes are computed bit by bit, so that they are the same on every GPU.
    kind = FP8_BITS if blocks.kind(0) in (FP8, FP8_BITS) else blocks.kind(0)
    tile = min(_HEADS, power_of_two(heads))
    return Launch(
        rope_cache_kernel,
        (tokens, -(-heads // tile) - (-kv_heads // tile)),
        {
            "queries": queries,
            "keys": keys,
            "values": values,
            "out": out,
            "table": table,
            "positions": positions,
            "slots": slots,
            "query_weight": query_weight,
            "key_weight": key_weight,
            "eps": eps,
            "stride_query": queries.stride(0),
            "stride_key": keys.stride(0),
            "stride_value_token": values.stride(0),
            **blocks.arguments(layer, kind),
        },
        {
            "heads": heads,
            "kv_heads": kv_heads,
            "tile": tile,
            "dim": dim,
            "half": half,
            "tile_half": power_of_two(half),
            "tile_rest": power_of_two(max(1, dim - 2 * half)),
            "block_size": blocks.block_size,
            "kind": kind,
            "normed": query_weight is not None,
        },
    )


def _check(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: KvBlocks,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    query_weight: torch.Tensor | None,
    key_weight: torch.Tensor | None,
) -> None:
    tokens, _, dim = queries.shape
    if keys.shape != (tokens, blocks.heads, blocks.dim) or values.shape != keys.shape:
        raise ValueError(f"keys and values must be [{tokens}, {blocks.heads}, {blocks.dim}]")
    if dim != blocks.dim or {keys.dtype, values.dtype} != {queries.dtype}:
        raise ValueError("queries, keys and values must have the same head size and type")
    for name, tensor in (("queries", queries), ("keys", keys), ("values", values)):
        check_strides(tensor, name)
        if tensor.shape[1] > 1 and tensor.stride(1) != dim:
            raise ValueError(f"the heads of {name} must be adjacent")
    if table.dim() != 3 or table.shape[1] != 2 or not 0 < 2 * table.shape[2] <= dim:
        raise ValueError(f"the table must be [positions, 2, rotated / 2], at most {dim} rotated")
    if table.dtype != torch.float32 or not table.is_contiguous():
        raise ValueError("the table must be fp32 and contiguous")
    if positions.shape != (tokens,) or slots.shape != (tokens,) or slots.dtype != torch.int64:
        raise ValueError(f"positions and slots (int64) must be [{tokens}]")
    if (query_weight is None) != (key_weight is None):
        raise ValueError("norm both queries and keys, or neither")
    for weight in (query_weight, key_weight):
        if weight is not None and (weight.dtype != torch.float32 or weight.shape != (dim,)):
            raise ValueError(f"a norm's weight must be fp32 [{dim}]")


def rope_cache_reference(
    queries: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    blocks: KvBlocks,
    layer: int,
    table: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    *,
    query_weight: torch.Tensor | None = None,
    key_weight: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """The reference for ``rope_cache``, in plain torch; it also writes to the blocks."""
    rotation = table[positions]
    turned = _rotate(_normed(queries, query_weight, eps), rotation)
    real = slots >= 0
    block, slot = slots[real] // blocks.block_size, slots[real] % blocks.block_size
    for which, x in (
        (0, _rotate(_normed(keys, key_weight, eps), rotation)),
        (1, values.float()),
    ):
        codes, scales = quantize(x[real], blocks.data.dtype)
        data = blocks.data
        if data.itemsize == 1:
            # As bytes, because torch cannot index fp8 on every device.
            data, codes = data.view(torch.uint8), codes.view(torch.uint8)
        data[block, layer, which, :, slot] = codes
        if scales is not None and blocks.scales is not None:
            blocks.scales[block, layer, which, :, slot] = scales
    return turned.to(queries.dtype)


def _normed(x: torch.Tensor, weight: torch.Tensor | None, eps: float) -> torch.Tensor:
    x = x.float()
    if weight is None:
        return x
    return x * torch.rsqrt(x.square().mean(dim=-1, keepdim=True) + eps) * weight


def _rotate(x: torch.Tensor, rotation: torch.Tensor) -> torch.Tensor:
    half = rotation.shape[2]
    first, second = x[..., :half], x[..., half : 2 * half]
    cos, sin = rotation[:, 0, None], rotation[:, 1, None]
    turned = (first * cos - second * sin, second * cos + first * sin, x[..., 2 * half :])
    return torch.cat(turned, dim=-1)
