"""The memory of the KV blocks: ``[block, layer, K/V, head, slot, dim]``.

A block is one contiguous piece of bytes across all layers, so that it moves in one piece: the codes
``[layer, K/V, head, slot, dim]``, then, where they are int8 or fp8, their scales ``[layer, K/V,
head, slot]`` in fp32, then what fills it up to a multiple of 64.
"""

from __future__ import annotations

import contextlib
import math
import mmap

import torch

from baton.errors import ConfigError
from baton.request import Geometry
from engine.host_memory import available_bytes
from engine.kv_quantization import dequantize_kv, has_scales, kv_dtype_name, quantize_kv
from engine.model_config import ModelConfig

_MADV_POPULATE_WRITE = 23
"""Of Linux 5.14 and later; Python's mmap has no name for it."""
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
    ) -> None:
        """``dtype`` is the model's, or int8 or float8_e4m3fn: then the codes have scales."""
        self.block_size = block_size
        self.blocks = blocks
        shape = _shape(config, block_size)
        codes = math.prod(shape) * dtype.itemsize
        size = block_bytes(config, block_size, dtype)
        self._bytes = _zeros(blocks * size, device).view(blocks, size)
        self.data = self._bytes[:, :codes].view(dtype).view(blocks, *shape)
        """``[block, layer, K/V, head, slot, dim]``, by strides."""
        self.scales: torch.Tensor | None = None
        """fp32 ``[block, layer, K/V, head, slot]``, by strides: a value is its code times that."""
        self._bits = self.data
        if has_scales(dtype):
            scales = self._bytes[:, codes : codes + math.prod(shape[:-1]) * 4]
            self.scales = scales.view(torch.float32).view(blocks, *shape[:-1])
            # torch has no indexing of fp8.
            self._bits = self._bytes[:, :codes].view(blocks, *shape)

    @property
    def block_bytes(self) -> int:
        return self._bytes.shape[1]

    def geometry(self) -> Geometry:
        _, layers, _, heads, size, dim = self.data.shape
        return Geometry(size, layers, heads, dim, kv_dtype_name(self.data.dtype))

    def block(self, block: int) -> torch.Tensor:
        """A block's bytes: a uint8 view [block_bytes] on the cache's device."""
        return self._bytes[block]

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
                self.data[blocks, layer, which, :, slots] = found
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


def _zeros(size: int, device: torch.device) -> torch.Tensor:
    """uint8 [size]. Zeros, so that slots past a sequence's end, which are masked, hold no NaN.

    On the CPU in large pages, where the kernel gives them: attention jumps from block to block, and
    with small pages each jump would cost a search of the page table. Taken at once: a step that is
    the first to write a page would wait until the kernel has cleared it.
    """
    if device.type != "cpu":
        return torch.zeros(size, dtype=torch.uint8, device=device)
    available = available_bytes()
    if size > available:
        # The kernel would grant it now and kill a process when the pages are touched.
        raise ConfigError(
            f"{size >> 20} MiB for KV blocks are more than the {available >> 20} MiB that this "
            "machine has left; lower kv_pool_mib"
        )
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise ConfigError(
            f"{size >> 20} MiB for KV blocks cannot be had ({error}); lower kv_pool_mib"
        ) from error
    for wish in (getattr(mmap, "MADV_HUGEPAGE", None), _MADV_POPULATE_WRITE):
        # A kernel that does not know it refuses.
        with contextlib.suppress(OSError):
            if wish is not None:
                memory.madvise(wish)
    return torch.frombuffer(memory, dtype=torch.uint8)


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block, scales included: a multiple of 64."""
    shape = _shape(config, block_size)
    size = math.prod(shape) * dtype.itemsize
    if has_scales(dtype):
        size += math.prod(shape[:-1]) * 4
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _shape(config: ModelConfig, block_size: int) -> tuple[int, int, int, int, int]:
    return config.layers, 2, config.kv_heads, block_size, config.head_dim
