"""The memory of the KV blocks: ``[block, layer, K/V, head, slot, dim]``.

A block is one contiguous piece across all layers, so that it moves in one piece.
"""

from __future__ import annotations

import torch

from baton.request import Geometry
from engine.model_config import ModelConfig


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
        self.block_size = block_size
        self.blocks = blocks
        shape = (blocks, config.layers, 2, config.kv_heads, block_size, config.head_dim)
        # Zeros, so that slots past a sequence's end, which are masked, hold no NaN.
        self.data = torch.zeros(shape, dtype=dtype, device=device)
        self._bytes = self.data.view(torch.uint8).view(blocks, -1)

    @property
    def block_bytes(self) -> int:
        return self._bytes.shape[1]

    def geometry(self) -> Geometry:
        _, layers, _, heads, size, dim = self.data.shape
        return Geometry(size, layers, heads, dim, str(self.data.dtype).removeprefix("torch."))

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
        self.data[blocks, layer, 0, :, slots] = keys
        self.data[blocks, layer, 1, :, slots] = values

    def gather(self, layer: int, tables: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of whole block tables [sequences, blocks], contiguous per head:

        twice [sequences, kv_heads, blocks * block_size, head_dim].
        """
        sequences, count = tables.shape
        _, _, _, heads, size, dim = self.data.shape
        by_head = self.data[:, layer].permute(1, 2, 0, 3, 4)
        found = by_head.index_select(2, tables.reshape(-1))
        both = found.view(2, heads, sequences, count * size, dim).transpose(1, 2)
        return both[0], both[1]


def block_bytes(config: ModelConfig, block_size: int, dtype: torch.dtype) -> int:
    """Bytes of one block."""
    per_slot = 2 * config.layers * config.kv_heads * config.head_dim * dtype.itemsize
    return per_slot * block_size
