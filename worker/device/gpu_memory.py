"""KV blocks on a GPU, for transports that copy through the host."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch

from kvtransfer.memory import copying
from kvtransfer.memory.checksum_triton import checksum_tensor
from kvtransfer.memory.memory import PartByPart, SharedFile, check_part


class GpuMemory(PartByPart):
    """Implements ``kvtransfer.memory.memory.BlockMemory`` over blocks on a CUDA device.

    It is safe while a step runs: a block that is read is complete, and a block that is written is
    in no plan before its copy has ended. One part at a time goes through the pinned staging memory,
    which has the size of one block. The link between host and GPU would not carry two parts faster.
    """

    def __init__(self, data: torch.Tensor) -> None:
        """``data`` is contiguous uint8 [blocks, block_bytes] on a CUDA device; the caller owns it.

        Raises ValueError for other data.
        """
        if data.dtype != torch.uint8 or data.dim() != 2 or not data.is_contiguous():
            raise ValueError("data must be contiguous uint8 [blocks, block_bytes]")
        self._data = data
        # A stream of its own: on the default stream a copy would wait for the engine's steps.
        self._stream = torch.cuda.Stream(data.device)  # type: ignore[no-untyped-call]
        self._lock = threading.Lock()
        self._staging = _pinned(self.block_bytes)
        copying.copy_library()

    @property
    def blocks(self) -> int:
        return self._data.shape[0]

    @property
    def block_bytes(self) -> int:
        return self._data.shape[1]

    @property
    def device(self) -> str:
        return str(self._data.device)

    @property
    def address(self) -> int:
        return self._data.data_ptr()

    @property
    def shared_file(self) -> SharedFile | None:
        return None

    def checksum(self, block: int, offset: int, length: int) -> int:
        """Compute the checksum of a part of a block on the GPU. If the part begins or ends within a
        word, the CPU computes it."""
        part = self._part(block, offset, length)
        if offset % 4 or length % 8:
            with self._lock:
                return copying.checksum(self._fetch(part))
        with torch.cuda.stream(self._stream):
            return checksum_tensor(part)

    def read(self, block: int, offset: int, out: memoryview) -> int:
        part = self._part(block, offset, out.nbytes)
        with self._lock:
            return copying.copy(out, self._fetch(part), soon_read=True)

    def write(self, block: int, offset: int, data: memoryview) -> int:
        """Write a part to a block. Returns the checksum of the staging memory from which the GPU
        copies."""
        part = self._part(block, offset, data.nbytes)
        with self._lock, torch.cuda.stream(self._stream):
            staged = self._staging[: data.nbytes]
            digest = copying.copy(staged.numpy(), data)
            part.copy_(staged, non_blocking=True)
            self._stream.synchronize()
            return digest

    @contextmanager
    def reading(self, block: int, offset: int, length: int) -> Iterator[memoryview]:
        """Let the context read the part in the staging memory. See ``BlockMemory``."""
        part = self._part(block, offset, length)
        with self._lock:
            yield self._fetch(part).data

    @contextmanager
    def writing(self, block: int, offset: int, length: int) -> Iterator[memoryview]:
        """Copy the part from the staging memory after the context has ended without an error. See
        ``BlockMemory``."""
        part = self._part(block, offset, length)
        with self._lock, torch.cuda.stream(self._stream):
            staged = self._staging[:length]
            yield staged.numpy().data
            part.copy_(staged, non_blocking=True)
            self._stream.synchronize()

    def _part(self, block: int, offset: int, length: int) -> torch.Tensor:
        check_part(self, block, offset, length)
        return self._data[block, offset : offset + length]

    def _fetch(self, part: torch.Tensor) -> npt.NDArray[np.uint8]:
        """Copy a part's bytes from the GPU into the staging memory. The caller holds the lock."""
        with torch.cuda.stream(self._stream):
            staged = self._staging[: part.numel()]
            staged.copy_(part, non_blocking=True)
            self._stream.synchronize()
            return staged.numpy()


def _pinned(size: int) -> torch.Tensor:
    return torch.empty(size, dtype=torch.uint8, pin_memory=True)
