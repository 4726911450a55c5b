"""Gathers blocks of all layers into one contiguous buffer for a handoff, and scatters them.

The KV type may change, and a range of heads may be selected, so that workers with different KV
types and tensor parallelism can exchange blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from engine.gpu.kernels.kv_blocks import (
    FP8,
    FP8_BITS,
    KvBlocks,
    as_number,
    dequantize,
    empty_kv_blocks,
    encode,
    quantize,
    scale_of,
)
from engine.gpu.kernels.launch import Launch, power_of_two

_TILE_NUMBERS = 4096


@triton.jit  # type: ignore[untyped-decorator]
def move_kernel(  # type: ignore[no-untyped-def]
    source,
    source_scales,
    source_ids,
    target,
    target_scales,
    target_ids,
    source_block,
    source_layer,
    source_value,
    source_head,
    source_slot,
    source_scale_block,
    source_scale_layer,
    source_scale_value,
    source_scale_head,
    source_scale_slot,
    target_block,
    target_layer,
    target_value,
    target_head,
    target_slot,
    target_scale_block,
    target_scale_layer,
    target_scale_value,
    target_scale_head,
    target_scale_slot,
    heads: tl.constexpr,
    dim: tl.constexpr,
    tile_dim: tl.constexpr,
    block_size: tl.constexpr,
    tile: tl.constexpr,
    source_kind: tl.constexpr,
    target_kind: tl.constexpr,
    gathers: tl.constexpr,
    scatters: tl.constexpr,
):
    """Move some slots of one head of one layer's keys or values in one block, from ``source`` to
    ``target``."""
    from_block = tl.program_id(0).to(tl.int64)
    to_block = from_block
    if gathers:
        from_block = tl.load(source_ids + from_block).to(tl.int64)
    if scatters:
        to_block = tl.load(target_ids + to_block).to(tl.int64)
    head = (tl.program_id(1) % heads).to(tl.int64)
    which = (tl.program_id(1) // heads % 2).to(tl.int64)
    layer = (tl.program_id(1) // heads // 2).to(tl.int64)
    slots = tl.program_id(2) * tile + tl.arange(0, tile)
    dims = tl.arange(0, tile_dim)
    real = slots < block_size
    inside = real[:, None] & (dims < dim)[None, :]
    source += from_block * source_block + layer * source_layer
    source += which * source_value + head * source_head
    codes = tl.load(source + slots[:, None] * source_slot + dims[None, :], mask=inside, other=0.0)
    scale = tl.full((tile,), 1.0, tl.float32)
    if source_kind != 0:
        source_scales += from_block * source_scale_block + layer * source_scale_layer
        source_scales += which * source_scale_value + head * source_scale_head
        scale = tl.load(source_scales + slots * source_scale_slot, mask=real, other=0.0)
    if source_kind != target_kind or source_kind == 0:
        numbers = as_number(codes, source_kind, tl.float32) * scale[:, None]
        if target_kind != 0:
            scale = scale_of(tl.max(tl.abs(numbers), axis=1), target_kind)
        codes = encode(numbers, scale, target_kind, target.dtype.element_ty)
    target += to_block * target_block + layer * target_layer
    target += which * target_value + head * target_head
    tl.store(target + slots[:, None] * target_slot + dims[None, :], codes, mask=inside)
    if target_kind != 0:
        target_scales += to_block * target_scale_block + layer * target_scale_layer
        target_scales += which * target_scale_value + head * target_scale_head
        tl.store(target_scales + slots * target_scale_slot, scale, mask=real)


def pack_blocks(
    cache: KvBlocks,
    ids: torch.Tensor,
    *,
    first_head: int = 0,
    heads: int | None = None,
    dtype: torch.dtype | None = None,
) -> KvBlocks:
    """Gather the blocks ``ids``, int32 [n], into one buffer, with ``heads`` heads from
    ``first_head`` on, as ``dtype``.

    Returns contiguous ``[n, layer, 2, heads, slot, dim]``. Raises ValueError if the heads do not
    exist.
    """
    count = cache.heads - first_head if heads is None else heads
    _, layers, _, _, size, dim = cache.data.shape
    shape = (len(ids), layers, 2, count, size, dim)
    packed = empty_kv_blocks(shape, dtype or cache.data.dtype, cache.data.device)
    move_launch(cache, ids, packed, None, first_head, 0, count).run()
    return packed


def unpack_blocks(
    packed: KvBlocks, cache: KvBlocks, ids: torch.Tensor, *, first_head: int = 0
) -> None:
    """Scatter ``packed`` ``[n, layer, 2, heads, slot, dim]`` into the blocks ``ids`` of a cache.

    The packed heads become the heads from ``first_head`` on, in the cache's type. Raises ValueError
    if shapes or types do not fit.
    """
    move_launch(packed, None, cache, ids, 0, first_head, packed.heads).run()


def move_launch(
    source: KvBlocks,
    source_ids: torch.Tensor | None,
    target: KvBlocks,
    target_ids: torch.Tensor | None,
    source_head: int,
    target_head: int,
    heads: int,
) -> Launch:
    """Describe the kernel launch that copies ``heads`` heads of some blocks. Ids of None mean all
    blocks, in order.

    A block id may occur only once in ``target_ids``. Stored numbers are copied unchanged if source
    and target have the same kind (``_kind``).
    """
    moved = _check(source, source_ids, target, target_ids, source_head, target_head, heads)
    _, layers, _, _, size, dim = source.data.shape
    tile_dim = power_of_two(dim)
    tile = min(power_of_two(size), max(1, _TILE_NUMBERS // tile_dim))
    source_kind, target_kind = _kind(source), _kind(target)
    return Launch(
        move_kernel,
        (moved, layers * 2 * heads, -(-size // tile)),
        {
            "source": source.codes(source_kind)[:, :, :, source_head:],
            "source_scales": None
            if source.scales is None
            else source.scales[:, :, :, source_head:],
            "source_ids": source_ids,
            "target": target.codes(target_kind)[:, :, :, target_head:],
            "target_scales": None
            if target.scales is None
            else target.scales[:, :, :, target_head:],
            "target_ids": target_ids,
            **_strides("source", source),
            **_strides("target", target),
        },
        {
            "heads": heads,
            "dim": dim,
            "tile_dim": tile_dim,
            "block_size": size,
            "tile": tile,
            "source_kind": source_kind,
            "target_kind": target_kind,
            "gathers": source_ids is not None,
            "scatters": target_ids is not None,
        },
    )


def _kind(blocks: KvBlocks) -> int:
    """Choose how the kernel reads and writes these blocks: ``PLAIN``, ``INT8`` or ``FP8_BITS``. fp8
    is converted bit by bit, which is the same on every GPU."""
    kind = blocks.kind(0)
    return FP8_BITS if kind in (FP8, FP8_BITS) else kind


def _strides(side: str, blocks: KvBlocks) -> dict[str, int]:
    names = ("block", "layer", "value", "head", "slot")
    data = blocks.data.stride()[:5]
    scales = (0,) * 5 if blocks.scales is None else blocks.scales.stride()
    return {f"{side}_{name}": stride for name, stride in zip(names, data, strict=True)} | {
        f"{side}_scale_{name}": stride for name, stride in zip(names, scales, strict=True)
    }


def _check(
    source: KvBlocks,
    source_ids: torch.Tensor | None,
    target: KvBlocks,
    target_ids: torch.Tensor | None,
    source_head: int,
    target_head: int,
    heads: int,
) -> int:
    """Check the arguments of ``move_launch``. Raises ValueError if they do not fit. Returns the
    number of blocks."""
    alike = [(x.data.shape[1], *x.data.shape[4:]) for x in (source, target)]
    if alike[0] != alike[1]:
        raise ValueError(f"layers, slots and dimensions differ: {alike[0]} and {alike[1]}")
    for blocks, first in ((source, source_head), (target, target_head)):
        if first < 0 or heads < 1 or first + heads > blocks.heads:
            raise ValueError(
                f"heads {first} to {first + heads} do not exist: blocks have {blocks.heads}"
            )
    counts = []
    for blocks, ids in ((source, source_ids), (target, target_ids)):
        if ids is not None and (ids.dtype != torch.int32 or not ids.is_contiguous()):
            raise ValueError("block ids must be int32 and contiguous")
        counts.append(blocks.data.shape[0] if ids is None else len(ids))
    if counts[0] != counts[1]:
        raise ValueError(f"cannot move {counts[0]} blocks into {counts[1]}")
    return counts[0]


def pack_blocks_reference(
    cache: KvBlocks, ids: torch.Tensor, first_head: int, heads: int, dtype: torch.dtype
) -> KvBlocks:
    """The reference for ``pack_blocks``, in plain torch."""
    taken = slice(first_head, first_head + heads)
    data = cache.data.view(torch.uint8) if cache.data.itemsize == 1 else cache.data
    codes = data[ids][:, :, :, taken].contiguous().view(cache.data.dtype)
    scales = None if cache.scales is None else cache.scales[ids][:, :, :, taken].contiguous()
    picked = KvBlocks(codes, scales)
    if dtype == cache.data.dtype:
        return picked
    return KvBlocks(*quantize(dequantize(picked), dtype))
