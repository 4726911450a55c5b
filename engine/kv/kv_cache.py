"""The memory of the KV blocks: ``[block, layer, K/V, head, slot, dim]``.

A block is one contiguous piece of bytes across all layers, so that it moves in one piece. It has a
part for each group of layers that share the block table: the ``target``'s, and behind it, where one
guesses tokens with a model of its own, the ``drafter``'s. A part has the codes ``[layer, K/V, head,
slot, dim]``, then, where they are int8 or fp8, their scales ``[layer, K/V, head, slot]`` in fp32,
then, the drafter's alone, how many of its slots are filled, and what fills it up to a multiple of
64.
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
"""Blocks and their parts begin at multiples of a CPU's cache line."""
_FILLED_BYTES = 8
"""How many slots of a drafter's part are filled: int64."""


class KvGroup:
    """One group's part of all blocks, as a view of their bytes. The engine thread writes it."""

    def __init__(self, parts: torch.Tensor, config: ModelConfig, size: int, dtype: torch.dtype):
        """``parts`` uint8 [blocks, part_bytes], by strides; blocks of ``size`` slots."""
        self.block_size = size
        shape = _shape(config, size)
        codes = math.prod(shape) * dtype.itemsize
        blocks = parts.shape[0]
        self.data = parts[:, :codes].view(dtype).view(blocks, *shape)
        """``[block, layer, K/V, head, slot, dim]``, by strides."""
        self.scales: torch.Tensor | None = None
        """fp32 ``[block, layer, K/V, head, slot]``, by strides: a value is its code times that."""
        self._bits = self.data
        if has_scales(dtype):
            scales = parts[:, codes : codes + math.prod(shape[:-1]) * 4]
            self.scales = scales.view(torch.float32).view(blocks, *shape[:-1])
            # torch has no indexing of fp8.
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
        """Store keys and values [tokens, kv_heads, head_dim] at (block, slot) [tokens] each."""
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
        """The bytes of the tokens at (block, slot) [tokens] each, of one layer or of all.

        uint8 [tokens, bytes]: the codes, then their scales, if there are any.
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
        """Write what ``stored`` gives of tokens, here or in a cache alike, at (block, slot)."""
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
        """Keys and values of whole block tables [sequences, blocks], contiguous per head:

        twice [sequences, kv_heads, blocks * block_size, head_dim] of ``dtype``.
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
    """The drafter's part of all blocks, and how much of each is filled.

    What a drafter makes of a token is there later than what the model makes of it, or never: it may
    have been switched off. The count lies in the block, so that it goes wherever the block goes.
    """

    def __init__(self, parts: torch.Tensor, config: ModelConfig, size: int, dtype: torch.dtype):
        super().__init__(parts, config, size, dtype)
        begin = _codes_and_scales(config, size, dtype)
        begin = -(-begin // _FILLED_BYTES) * _FILLED_BYTES
        self.filled = parts[:, begin : begin + _FILLED_BYTES].view(torch.int64)[:, 0]
        """int64 [blocks], by strides: so many leading slots hold what the drafter made of the
        tokens that the target's part holds there."""


class KvCache(KvGroup):
    """The blocks, and as a group itself the target's part of them.

    The engine thread writes them; blocks that no plan in flight names may be read and written by
    others.
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
        """``dtype`` is a plain one, or int8 or float8_e4m3fn: then the codes have scales.

        ``allocate`` gives the memory, once. ``drafter`` is the shape of what has a group of its
        own. Of one of several ``ranks``, ``config`` is its shard of the ``whole`` model.
        """
        self.blocks = blocks
        self._ranks = ranks
        self._whole_heads = (whole or config).kv_heads
        own = block_bytes(config, block_size, dtype)
        size = block_bytes(config, block_size, dtype, drafter)
        self.bytes = (allocate or allocate_plain)(blocks * size, device).view(blocks, size)
        """uint8 ``[block, block_bytes]``: each block as it travels."""
        super().__init__(self.bytes[:, :own], config, block_size, dtype)
        self.drafter: DrafterGroup | None = None
        """The drafter's part of the blocks, if there is one."""
        if drafter is not None:
            self.drafter = DrafterGroup(self.bytes[:, own:], drafter, block_size, dtype)
        self.geometry = self._geometry()
        """Of the whole worker's blocks, of which each of its ranks has a part."""

    @property
    def groups(self) -> Mapping[str, KvGroup]:
        """By their names, in their order in the block."""
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
        """A block's bytes: a uint8 view [block_bytes] on the cache's device."""
        return self.bytes[block]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to) each; none of them is in two pairs as the target."""
        if copies:
            pairs = torch.tensor(copies, device=self.bytes.device)
            self.bytes[pairs[:, 1]] = self.bytes[pairs[:, 0]]


Allocate = Callable[[int, torch.device], torch.Tensor]
"""Gives uint8 [size] of zeros on a device, at an address that is a multiple of 64: slots past a
sequence's end, which are masked, must hold no NaN. Raises ConfigError."""


def allocate_plain(size: int, device: torch.device) -> torch.Tensor:
    """Memory of this process alone; see ``Allocate``."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return torch.frombuffer(take_memory(size), dtype=torch.uint8)


def block_bytes(
    config: ModelConfig, block_size: int, dtype: torch.dtype, drafter: ModelConfig | None = None
) -> int:
    """Bytes of one block, scales and the drafter's part included: a multiple of 64."""
    size = _aligned(_codes_and_scales(config, block_size, dtype))
    if drafter is not None:
        used = _codes_and_scales(drafter, block_size, dtype)
        size += _aligned(-(-used // _FILLED_BYTES) * _FILLED_BYTES + _FILLED_BYTES)
    return size


def _codes_and_scales(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one group's codes and scales."""
    shape = _shape(config, block_size)
    size = math.prod(shape) * dtype.itemsize
    return size + math.prod(shape[:-1]) * 4 if has_scales(dtype) else size


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _shape(config: ModelConfig, block_size: int) -> tuple[int, int, int, int, int]:
    return config.layers, 2, config.kv_heads, block_size, config.head_dim
