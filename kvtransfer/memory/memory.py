"""The interface through which transports access KV blocks, whatever memory holds them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.errors import HandoffError
from kvtransfer.memory import copying


@dataclass(frozen=True, slots=True)
class SharedFile:
    """An open file whose memory other processes of the host can map."""

    descriptor: int
    """Descriptor of the file in this process."""
    bytes: int
    board: npt.NDArray[np.uint64] | None = field(default=None, compare=False)
    """The words at the file's end, for ``kvtransfer.memory.seal_board``; None if it has none."""


class BlockMemory(Protocol):
    """The KV blocks of a worker, as bytes.

    Methods are called from transfer threads, never from an event loop, and release the GIL while
    they copy. ``offset`` and ``length`` are in bytes.
    """

    @property
    def blocks(self) -> int:
        """Number of blocks in the memory."""

    @property
    def block_bytes(self) -> int:
        """Number of bytes in one block: a multiple of 64."""

    @property
    def device(self) -> str:
        """Name of the device that holds the blocks: ``cpu``, or ``cuda:<index>``."""

    @property
    def address(self) -> int:
        """Address of the first block in the memory of ``device``. The other blocks follow without
        gaps."""

    @property
    def shared_file(self) -> SharedFile | None:
        """The file that holds the blocks in order; None if no other process can map them."""

    def checksum(self, block: int, offset: int, length: int) -> int:
        """Compute the checksum of part of a block, as ``kvtransfer.memory.checksum.checksum``
        defines it."""

    def read(self, block: int, offset: int, out: memoryview) -> int:
        """Copy part of a block into ``out`` (bytes, writable). Returns its checksum."""

    def write(self, block: int, offset: int, data: memoryview) -> int:
        """Overwrite part of a block. Returns the checksum of the written bytes."""

    def reading(self, block: int, offset: int, length: int) -> AbstractContextManager[memoryview]:
        """Let the context read the bytes of part of a block, in host memory."""

    def writing(self, block: int, offset: int, length: int) -> AbstractContextManager[memoryview]:
        """Let the context overwrite part of a block, through bytes in host memory.

        If the context raises an error, the part holds anything.
        """

    def checksum_many(self, blocks: Sequence[int], offset: int, length: int) -> tuple[int, ...]:
        """Compute the checksum of the same part of each of several blocks."""

    def read_many(
        self,
        blocks: Sequence[int],
        offset: int,
        outs: Sequence[memoryview],
    ) -> tuple[int, ...]:
        """Copy the same part of several blocks, each into its own buffer of ``outs``.

        All buffers have the same length. Returns the checksum of each part.
        """

    def write_many(
        self,
        blocks: Sequence[int],
        offset: int,
        length: int,
        source: memoryview,
        starts: Sequence[int],
    ) -> tuple[int, ...]:
        """Overwrite the same part of several blocks. The new bytes of each part begin at one of the
        offsets ``starts`` in ``source``.

        Returns the checksum of each part.
        """


class PartByPart:
    """Implements the methods for several blocks by one call per block, and ``reading`` and
    ``writing`` by copies.

    It is for memory in which several blocks at once are no faster than one after another.
    """

    def checksum_many(
        self: BlockMemory,
        blocks: Sequence[int],
        offset: int,
        length: int,
    ) -> tuple[int, ...]:
        """Compute the checksum of the same part of each of several blocks. See ``BlockMemory``."""
        return tuple(self.checksum(block, offset, length) for block in blocks)

    def read_many(
        self: BlockMemory,
        blocks: Sequence[int],
        offset: int,
        outs: Sequence[memoryview],
    ) -> tuple[int, ...]:
        """Copy the same part of several blocks, each into its own buffer. See ``BlockMemory``."""
        pairs = zip(blocks, outs, strict=True)
        return tuple(self.read(block, offset, out) for block, out in pairs)

    def write_many(
        self: BlockMemory,
        blocks: Sequence[int],
        offset: int,
        length: int,
        source: memoryview,
        starts: Sequence[int],
    ) -> tuple[int, ...]:
        """Overwrite the same part of several blocks. See ``BlockMemory``."""
        pairs = zip(blocks, starts, strict=True)
        return tuple(self.write(block, offset, source[at : at + length]) for block, at in pairs)

    @contextmanager
    def reading(self: BlockMemory, block: int, offset: int, length: int) -> Iterator[memoryview]:
        """Let the context read a copy of part of a block. See ``BlockMemory``."""
        data = memoryview(bytearray(length))
        self.read(block, offset, data)
        yield data

    @contextmanager
    def writing(self: BlockMemory, block: int, offset: int, length: int) -> Iterator[memoryview]:
        """Overwrite part of a block after the context has ended without an error. See
        ``BlockMemory``."""
        data = memoryview(bytearray(length))
        yield data
        self.write(block, offset, data)


def check_part(memory: BlockMemory, block: int, offset: int, length: int) -> None:
    """Raise HandoffError if the memory has no such part of a block. The check is needed because
    peers name the parts."""
    if not 0 <= block < memory.blocks or not 0 <= offset <= offset + length <= memory.block_bytes:
        raise HandoffError(
            f"block {block} has no {length} bytes at {offset}: there are {memory.blocks} blocks "
            f"of {memory.block_bytes} bytes"
        )


class HostMemory:
    """Implements ``kvtransfer.memory.memory.BlockMemory`` over blocks in host memory.

    It is safe while a step runs: a block that is read is complete, and a block that is written is
    in no plan before its copy has ended.
    """

    def __init__(self, data: npt.NDArray[np.uint8], shared_file: SharedFile | None = None) -> None:
        """``data`` is contiguous uint8 [blocks, block_bytes]; the caller owns it.

        ``shared_file`` is a file whose first bytes are ``data``; see
        ``kvtransfer.memory.shared_pool``. Builds the copy library, which may take seconds the first
        time. Raises ValueError for other data.
        """
        if data.dtype != np.uint8 or data.ndim != 2 or not data.flags.c_contiguous:
            raise ValueError("data must be contiguous uint8 [blocks, block_bytes]")
        self._data = data
        self._shared_file = shared_file
        copying.copy_library()

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The bytes of all blocks, in order: uint8 [bytes], a view."""
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
        # The part is sent next.
        return copying.copy(out, self._part(block, offset, out.nbytes), soon_read=True)

    def write(self, block: int, offset: int, data: memoryview) -> int:
        return copying.copy(self._part(block, offset, data.nbytes), data)

    def reading(self, block: int, offset: int, length: int) -> AbstractContextManager[memoryview]:
        """Let the context read the block itself. See ``BlockMemory``."""
        return nullcontext(self._part(block, offset, length).data)

    def writing(self, block: int, offset: int, length: int) -> AbstractContextManager[memoryview]:
        """Let the context write to the block itself. See ``BlockMemory``."""
        return nullcontext(self._part(block, offset, length).data)

    def checksum_many(self, blocks: Sequence[int], offset: int, length: int) -> tuple[int, ...]:
        return copying.checksum_many(self.data, self._starts(blocks, offset, length), length)

    def read_many(
        self,
        blocks: Sequence[int],
        offset: int,
        outs: Sequence[memoryview],
    ) -> tuple[int, ...]:
        length = outs[0].nbytes
        starts = self._starts(blocks, offset, length)
        return copying.copy_out(outs, self.data, starts, length)

    def write_many(
        self,
        blocks: Sequence[int],
        offset: int,
        length: int,
        source: memoryview,
        starts: Sequence[int],
    ) -> tuple[int, ...]:
        origin = np.frombuffer(source, dtype=np.uint8)
        places = self._starts(blocks, offset, length)
        origins = np.array(starts, dtype=np.int64)
        return copying.copy_many(self.data, places, origin, origins, length)

    def _starts(self, blocks: Sequence[int], offset: int, length: int) -> npt.NDArray[np.int64]:
        """Return the offsets in the memory at which the same part of each block begins. Raises
        HandoffError for an invalid part."""
        if blocks:
            check_part(self, min(blocks), offset, length)
            check_part(self, max(blocks), offset, length)
        return np.array(blocks, dtype=np.int64) * self.block_bytes + offset

    def _part(self, block: int, offset: int, length: int) -> npt.NDArray[np.uint8]:
        check_part(self, block, offset, length)
        return self._data[block, offset : offset + length]
