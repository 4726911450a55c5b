"""The memory of the KV blocks: ``[block, layer, K/V, head, slot, dim]``.

A block is contiguous across all layers, so that it moves in one piece. It has a part for each cache
group (layers that share the block table). These are the ``target`` model's and, if there is a
drafter with KV, the ``drafter``'s. A part begins with the numbers of keys and values (codes),
``[layer, K/V, head, slot, dim]``. If these are int8 or fp8, their scales ``[layer, K/V, head,
slot]`` in fp32 follow. The drafter's part ends with its number of filled slots. Padding completes a
multiple of 64 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch

from baton.host.host_memory import take_memory
from baton.request import Geometry, GroupShape
from engine.checkpoint.model_config import ModelConfig
from engine.kv.kv_quantization import dequantize_kv, has_scales, kv_dtype_name, quantize_kv

_ALIGNMENT = 64
"""Alignment in bytes of blocks and of their parts: a CPU's cache line."""
_FILLED_BYTES = 8
"""Bytes of the number of filled slots in the drafter's part of a block: int64."""


class KvGroup:
    """The part of all blocks that belongs to one cache group, as a view of the blocks' bytes. Only
    the engine thread writes it."""

    def __init__(self, parts: torch.Tensor, config: ModelConfig, size: int, dtype: torch.dtype):
        """``parts`` is this group's part of all blocks, uint8 [blocks, part_bytes], strided; blocks
        have ``size`` slots."""
        self.block_size = size
        shape = _shape(config, size)
        codes = math.prod(shape) * dtype.itemsize
        blocks = parts.shape[0]
        self.data = parts[:, :codes].view(dtype).view(blocks, *shape)
        """Keys and values (codes if quantized), ``[block, layer, K/V, head, slot, dim]``,
        strided."""
        self.scales: torch.Tensor | None = None
        """Scales of int8 and fp8 codes, fp32 ``[block, layer, K/V, head, slot]``, strided; a value
        is its code times its scale. None if values are not quantized."""
        self._bits = self.data
        if has_scales(dtype):
            scales = parts[:, codes : codes + math.prod(shape[:-1]) * 4]
            self.scales = scales.view(torch.float32).view(blocks, *shape[:-1])
            # torch cannot index fp8.
            self._bits = parts[:, :codes].view(blocks, *shape)

    @property
    def shape(self) -> GroupShape:
        _, layers, _, heads, _, dim = self.data.shape
        return GroupShape(layers, heads, dim)

    def write(
        self,
        layer: int,
        keys: torch.Tensor,
        values: torch.Tensor,
        blocks: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Store the keys and values of tokens, each [tokens, kv_heads, head_dim], in one layer.
        Token i goes to slot ``slots[i]`` of block ``blocks[i]``."""
        for which, found in enumerate((keys, values)):
            if self.scales is None:
                self.data[blocks, layer, which, :, slots] = found.to(self.data.dtype)
                continue
            codes, scales = quantize_kv(found, self.data.dtype)
            self._bits[blocks, layer, which, :, slots] = codes.view(torch.uint8)
            self.scales[blocks, layer, which, :, slots] = scales

    def stored(
        self, blocks: torch.Tensor, slots: torch.Tensor, layer: int | None = None
    ) -> torch.Tensor:
        """Read the KV bytes of tokens in one layer, or in all layers (None). ``blocks`` and
        ``slots``, both [tokens], have each token's block and slot.

        Returns uint8 [tokens, bytes]: the codes, then their scales, if there are any.
        """
        layers = slice(None) if layer is None else layer
        codes = self._bits[blocks, layers, :, :, slots].flatten(1).contiguous().view(torch.uint8)
        if self.scales is None:
            return codes
        scales = self.scales[blocks, layers, :, :, slots].flatten(1).contiguous()
        return torch.cat((codes, scales.view(torch.uint8)), dim=1)

    def store(
        self,
        blocks: torch.Tensor,
        slots: torch.Tensor,
        found: torch.Tensor,
        layer: int | None = None,
    ) -> None:
        """Write KV bytes of tokens into the given blocks and slots. ``found`` is a result of
        ``stored`` of this cache, or of another cache with the same shape."""
        layers = slice(None) if layer is None else layer
        _, every, _, heads, _, dim = self.data.shape
        shape = (len(found), *(() if layer is not None else (every,)), 2, heads)
        count = math.prod(shape[1:]) * dim * self._bits.itemsize
        codes = found[:, :count].contiguous().view(self._bits.dtype)
        self._bits[blocks, layers, :, :, slots] = codes.view(*shape, dim)
        if self.scales is not None:
            scales = found[:, count:].contiguous().view(torch.float32)
            self.scales[blocks, layers, :, :, slots] = scales.view(shape)

    def gather(
        self, layer: int, tables: torch.Tensor, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Copy the keys and values of whole block tables [sequences, blocks], contiguous for each
        head.

        Returns two tensors [sequences, kv_heads, blocks * block_size, head_dim] of ``dtype``.
        """
        sequences, count = tables.shape
        _, _, _, heads, size, dim = self.data.shape
        chosen = tables.reshape(-1)
        found = self._bits[:, layer].permute(1, 2, 0, 3, 4).index_select(2, chosen)
        if self.scales is not None:
            scales = self.scales[:, layer].permute(1, 2, 0, 3).index_select(2, chosen)
            found = dequantize_kv(found.view(self.data.dtype), scales)
        both = found.to(dtype).view(2, heads, sequences, count * size, dim).transpose(1, 2)
        return both[0], both[1]


class DrafterGroup(KvGroup):
    """The drafter's part of all KV blocks, with the number of filled slots of each block.

    A drafter processes a token later than the target model, or never, because it may have been
    switched off. The number of filled slots is stored in the block, so that it moves with the
    block.
    """

    def __init__(self, parts: torch.Tensor, config: ModelConfig, size: int, dtype: torch.dtype):
        super().__init__(parts, config, size, dtype)
        begin = _codes_and_scales(config, size, dtype)
        begin = -(-begin // _FILLED_BYTES) * _FILLED_BYTES
        self.filled = parts[:, begin : begin + _FILLED_BYTES].view(torch.int64)[:, 0]
        """For each block, the number of leading slots that have the drafter's KV of the same tokens
        as the target's part: int64 [blocks], strided."""


class KvCache(KvGroup):
    """The KV blocks of an engine. The base class ``KvGroup`` gives access to the target model's
    part of the blocks.

    The engine thread writes them. Other threads may read and write blocks that no plan in flight
    names.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate | None = None,
        drafter: ModelConfig | None = None,
        whole: ModelConfig | None = None,
        ranks: int = 1,
    ) -> None:
        """``dtype`` is the type of keys and values: a floating-point type, or int8 or float8_e4m3fn
        for codes with scales.

        ``allocate`` is called once for the memory. ``drafter`` is the configuration of a drafter
        that has KV. With several ``ranks``, ``config`` is this rank's shard of the ``whole`` model.
        """
        self.blocks = blocks
        self._ranks = ranks
        self._whole_heads = (whole or config).kv_heads
        own = block_bytes(config, block_size, dtype)
        size = block_bytes(config, block_size, dtype, drafter)
        self.bytes = (allocate or allocate_plain)(blocks * size, device).view(blocks, size)
        """The memory of all blocks, uint8 ``[block, block_bytes]``. A block is sent as these
        bytes."""
        super().__init__(self.bytes[:, :own], config, block_size, dtype)
        self.drafter: DrafterGroup | None = None
        """The drafter's part of the blocks; None without a drafter that has KV."""
        if drafter is not None:
            self.drafter = DrafterGroup(self.bytes[:, own:], drafter, block_size, dtype)
        self.geometry = self._geometry()
        """Layout of the whole worker's blocks; each of its ranks has a part of every block."""

    @property
    def groups(self) -> Mapping[str, KvGroup]:
        """The cache groups by name, in the order of their parts in a block."""
        found: dict[str, KvGroup] = {"target": self}
        if self.drafter is not None:
            found["drafter"] = self.drafter
        return found

    @property
    def block_bytes(self) -> int:
        return self.bytes.shape[1]

    def _geometry(self) -> Geometry:
        _, layers, _, _, size, dim = self.data.shape
        drafter = None if self.drafter is None else self.drafter.shape
        name = kv_dtype_name(self.data.dtype)
        return Geometry(size, layers, self._whole_heads, dim, name, self._ranks, drafter=drafter)

    def block(self, block: int) -> torch.Tensor:
        """Return a block's bytes: a uint8 view [block_bytes] on the cache's device."""
        return self.bytes[block]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, given as pairs (from, to). Each block is the target of at most one
        pair."""
        if copies:
            pairs = torch.tensor(copies, device=self.bytes.device)
            self.bytes[pairs[:, 1]] = self.bytes[pairs[:, 0]]


Allocate = Callable[[int, torch.device], torch.Tensor]
"""Allocates the cache's memory: uint8 [size] of zeros on a device, at an address that is a multiple
of 64. Zeros are needed because slots past a sequence's end are masked, and must hold no NaN. Raises
ConfigError."""


def allocate_plain(size: int, device: torch.device) -> torch.Tensor:
    """Allocate zeros in memory that only this process uses. Implements ``Allocate``."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return torch.frombuffer(take_memory(size), dtype=torch.uint8)


def block_bytes(
    config: ModelConfig, block_size: int, dtype: torch.dtype, drafter: ModelConfig | None = None
) -> int:
    """Compute the bytes of one block, including scales and the drafter's part: a multiple of 64."""
    size = _aligned(_codes_and_scales(config, block_size, dtype))
    if drafter is not None:
        used = _codes_and_scales(drafter, block_size, dtype)
        size += _aligned(-(-used // _FILLED_BYTES) * _FILLED_BYTES + _FILLED_BYTES)
    return size


def _codes_and_scales(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Compute the bytes of one group's codes and scales in a block."""
    shape = _shape(config, block_size)
    size = math.prod(shape) * dtype.itemsize
    return size + math.prod(shape[:-1]) * 4 if has_scales(dtype) else size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _shape(config: ModelConfig, block_size: int) -> tuple[int, int, int, int, int]:
    return config.layers, 2, config.kv_heads, block_size, config.head_dim
