"""Blocks in a numpy array, and two transports whose blocks they are."""

from __future__ import annotations

import threading

import numpy as np
import numpy.typing as npt

from kvtransfer.memory.checksum import checksum
from kvtransfer.memory.memory import PartByPart, SharedFile


class ArrayMemory(PartByPart):
    """A ``BlockMemory`` of random bytes, or of zeros."""

    def __init__(self, blocks: int, block_bytes: int, seed: int | None = None) -> None:
        self.array: npt.NDArray[np.uint8] = np.zeros((blocks, block_bytes), dtype=np.uint8)
        if seed is not None:
            self.array = np.random.default_rng(seed).integers(
                0, 256, (blocks, block_bytes), dtype=np.uint8
            )
        self.blocks = blocks
        self.block_bytes = block_bytes
        self.device = "cpu"
        self.shared_file: SharedFile | None = None
        self.may_write = threading.Event()
        self.may_write.set()
        self.writes = threading.Semaphore(0)
        """Released when a write begins."""

    @property
    def address(self) -> int:
        return self.array.ctypes.data

    def checksum(self, block: int, offset: int, length: int) -> int:
        return checksum(self._part(block, offset, length).data)

    def read(self, block: int, offset: int, out: memoryview) -> int:
        part = self._part(block, offset, len(out))
        out[:] = part.data
        return checksum(part.data)

    def write(self, block: int, offset: int, data: memoryview) -> int:
        self.writes.release()
        assert self.may_write.wait(30)
        self._part(block, offset, len(data))[:] = np.frombuffer(data, dtype=np.uint8)
        return checksum(data)

    def _part(self, block: int, offset: int, length: int) -> npt.NDArray[np.uint8]:
        part = self.array[block, offset : offset + length]
        assert part.size == length
        return part
