"""The memory of a worker's KV blocks: its allocation, and the view for transports."""

from __future__ import annotations

import torch

from engine.kv.kv_cache import KvCache, allocate_plain
from kvtransfer.memory.memory import BlockMemory, HostMemory
from kvtransfer.memory.shared_pool import SharedPool, allocate


class PoolMemory:
    """Allocates a worker's KV blocks, and returns the view of them that transports use.

    ``allocate`` is called once, while the engine is built. ``of`` is called after that.
    """

    def __init__(self, *, shared: bool) -> None:
        """``shared``: true if other processes of the host may map the blocks. On a GPU it has no
        effect."""
        self._shared = shared
        self._pool: SharedPool | None = None

    def allocate(self, size: int, device: torch.device) -> torch.Tensor:
        """Allocate the KV pool: uint8 [size] of zeros. Raises ConfigError if there is too little
        memory."""
        if device.type != "cpu" or not self._shared:
            return allocate_plain(size, device)
        self._pool = allocate(size)
        return torch.from_numpy(self._pool.data)

    def of(self, cache: KvCache) -> BlockMemory:
        """Return the transports' view of the blocks of ``cache``, which are in the memory that
        ``allocate`` returned."""
        blocks = cache.bytes
        if blocks.is_cuda:
            # Imported here: it is slow to import, and CPUs do not need it.
            from worker.device.gpu_memory import GpuMemory  # noqa: PLC0415

            return GpuMemory(blocks)
        return HostMemory(blocks.numpy(), self._pool.file if self._pool is not None else None)

    def close(self) -> None:
        """Prevent other processes from mapping the blocks from now on; idempotent."""
        if self._pool is not None:
            self._pool.close()
            self._pool = None
