"""KV blocks in the memory of the host, as transports see them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from kvtransfer.memory import copying
from kvtransfer.memory.memory import SharedFile, check_part


class HostMemory:
    """``kvtransfer.memory.memory.BlockMemory`` over blocks that the CPU reads.

    Safe beside a running step, because a block that is read is complete, and one that is written is
    in no plan before its copy has ended.
    """

    def __init__(self, data: npt.NDArray[np.uint8], shared_file: SharedFile | None = None) -> None:
        """``data`` uint8 [blocks, block_bytes], contiguous, stays the caller's; see

        ``kvtransfer.memory.shared_pool`` for ``shared_file``, which it begins. Builds what
        copies, which may take seconds the first time. Raises ValueError for other data.
        """
        if data.dtype != np.uint8 or data.ndim != 2 or not data.flags.c_contiguous:
            raise ValueError("contiguous uint8 [blocks, block_bytes] is needed")
        self._data = data
        self._shared_file = shared_file
        copying.copy_library()

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """All blocks, one after another: uint8 [bytes], a view."""
        return self._data.reshape(-1)

    @property
    def blocks(self) -> int:
        return int(self._data.shape[0])

    @property
    def block_bytes(self) -> int:
        return int(self._data.shape[1])

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def address(self) -> int:
        return int(self._data.ctypes.data)

    @property
    def shared_file(self) -> SharedFile | None:
        return self._shared_file

    def checksum(self, block: int, offset: int, length: int) -> int:
        return copying.checksum(self._part(block, offset, length))

    def read(self, block: int, offset: int, out: memoryview) -> int:
        # It is sent next.
        return copying.copy(out, self._part(block, offset, out.nbytes), soon_read=True)

    def write(self, block: int, offset: int, data: memoryview) -> int:
        return copying.copy(self._part(block, offset, data.nbytes), data)

    def checksum_many(self, blocks: Sequence[int], offset: int, length: int) -> tuple[int, ...]:
        return copying.checksum_many(self._run(blocks, offset, length))

    def read_many(
        self, blocks: Sequence[int], offset: int, outs: Sequence[memoryview]
    ) -> tuple[int, ...]:
        return copying.copy_out(outs, self._run(blocks, offset, outs[0].nbytes))

    def write_many(
        self,
        blocks: Sequence[int],
        offset: int,
        length: int,
        source: memoryview,
        starts: Sequence[int],
    ) -> tuple[int, ...]:
        origin = np.frombuffer(source, dtype=np.uint8)
        run = copying.Run(origin, np.array(starts, dtype=np.int64), length)
        return copying.copy_many(self._run(blocks, offset, length), run)

    def _run(self, blocks: Sequence[int], offset: int, length: int) -> copying.Run:
        for block in blocks:
            check_part(self, block, offset, length)
        starts = np.array(blocks, dtype=np.int64) * self.block_bytes + offset
        return copying.Run(self.data, starts, length)

    def _part(self, block: int, offset: int, length: int) -> npt.NDArray[np.uint8]:
        check_part(self, block, offset, length)
        return self._data[block, offset : offset + length]
