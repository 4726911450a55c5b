"""The memory of the KV blocks: ``[block, layer, K/V, head, slot, dim]``.

A block is one contiguous piece of bytes across all layers, so that it moves in one piece: the codes
``[layer, K/V, head, slot, dim]``, then, where they are int8 or fp8, their scales ``[layer, K/V,
head, slot]`` in fp32, then what fills it up to a multiple of 64.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from baton.host_memory import take_memory
from baton.request import Geometry
from engine.kv_quantization import dequantize_kv, has_scales, kv_dtype_name, quantize_kv
from engine.model_config import ModelConfig

_ALIGNMENT = 64
"""Blocks begin at multiples of a CPU's cache line."""


class KvCache:
    """The blocks of one cache group. The engine thread writes it; blocks that no plan in flight

    names may be read and written by others.
    """

    def __init__(
        self,
        config: ModelConfig,
        blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        allocate: Allocate | None = None,
    ) -> None:
        """``dtype`` is a plain one, or int8 or float8_e4m3fn: then the codes have scales.

        ``allocate`` gives the memory, once.
        """
        self.block_size = block_size
        self.blocks = blocks
        shape = _shape(config, block_size)
        codes = math.prod(shape) * dtype.itemsize
        size = block_bytes(config, block_size, dtype)
        self.bytes = (allocate or allocate_plain)(blocks * size, device).view(blocks, size)
        """uint8 ``[block, block_bytes]``: each block as it travels."""
        self.data = self.bytes[:, :codes].view(dtype).view(blocks, *shape)
        """``[block, layer, K/V, head, slot, dim]``, by strides."""
        self.scales: torch.Tensor | None = None
        """fp32 ``[block, layer, K/V, head, slot]``, by strides: a value is its code times that."""
        self._bits = self.data
        if has_scales(dtype):
            scales = self.bytes[:, codes : codes + math.prod(shape[:-1]) * 4]
            self.scales = scales.view(torch.float32).view(blocks, *shape[:-1])
            # torch has no indexing of fp8.
            self._bits = self.bytes[:, :codes].view(blocks, *shape)

    @property
    def block_bytes(self) -> int:
        return self.bytes.shape[1]

    def geometry(self) -> Geometry:
        _, layers, _, heads, size, dim = self.data.shape
        return Geometry(size, layers, heads, dim, kv_dtype_name(self.data.dtype))

    def block(self, block: int) -> torch.Tensor:
        """A block's bytes: a uint8 view [block_bytes] on the cache's device."""
        return self.bytes[block]

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy whole blocks, (from, to) each; none of them is in two pairs as the target."""
        if copies:
            pairs = torch.tensor(copies, device=self.bytes.device)
            self.bytes[pairs[:, 1]] = self.bytes[pairs[:, 0]]

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


Allocate = Callable[[int, torch.device], torch.Tensor]
"""Gives uint8 [size] of zeros on a device, at an address that is a multiple of 64: slots past a
sequence's end, which are masked, must hold no NaN. Raises ConfigError."""


def allocate_plain(size: int, device: torch.device) -> torch.Tensor:
    """Memory of this process alone; see ``Allocate``."""
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    return torch.frombuffer(take_memory(size), dtype=torch.uint8)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block, scales included: a multiple of 64."""
    shape = _shape(config, block_size)
    size = math.prod(shape) * dtype.itemsize
    if has_scales(dtype):
        size += math.prod(shape[:-1]) * 4
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _shape(config: ModelConfig, block_size: int) -> tuple[int, int, int, int, int]:
    return config.layers, 2, config.kv_heads, block_size, config.head_dim
