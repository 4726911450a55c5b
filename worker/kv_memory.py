"""The engine's KV blocks as transports see them."""

from __future__ import annotations

import torch

from engine.kv_cache import KvCache


class KvMemory:
    """``kvtransfer.memory.BlockMemory`` over a cache. Called from transfer threads.

    Safe beside a running step, because a block that is read is complete, and one that is written is
    in no plan before its copy has ended.
    """

    def __init__(self, cache: KvCache) -> None:
        self._cache = cache
        # Of its own: on the default stream a copy would wait for the engine's steps.
        self._stream: torch.cuda.Stream | None = None
        if cache.data.is_cuda:
            self._stream = torch.cuda.Stream(cache.data.device)  # type: ignore[no-untyped-call]

    @property
    def block_bytes(self) -> int:
        return self._cache.block_bytes

    def read(self, block: int, offset: int, length: int) -> bytes:
        """A copy of part of a block, from the device if need be."""
        with torch.cuda.stream(self._stream):
            part = self._cache.block(block)[offset : offset + length].cpu()
        return part.numpy().tobytes()

    def write(self, block: int, offset: int, data: bytes) -> None:
        """Overwrite part of a block; on a GPU it has arrived when this returns."""
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        with torch.cuda.stream(self._stream):
            self._cache.block(block)[offset : offset + len(data)].copy_(source)
        if self._stream is not None:
            self._stream.synchronize()
