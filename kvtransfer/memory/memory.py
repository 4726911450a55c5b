"""How transports reach KV blocks without knowing what holds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from baton.errors import HandoffError


@dataclass(frozen=True, slots=True)
class SharedFile:
    """Memory that other processes of the host can map."""

    descriptor: int
    """Of the file, in this process."""
    bytes: int


class BlockMemory(Protocol):
    """The bytes of a worker's blocks. Its methods are called from transfer threads, never from an

    event loop, and release the GIL while they copy. ``offset`` and ``length`` are in bytes.
    """

    @property
    def blocks(self) -> int:
        """How many blocks there are."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block: a multiple of 64."""

    @property
    def device(self) -> str:
        """``cpu``, or ``cuda:<index>``."""

    @property
    def address(self) -> int:
        """Where the first block begins, as ``device`` counts; the others follow without gaps."""

    @property
    def shared_file(self) -> SharedFile | None:
        """Where the blocks lie, one after another; None: no other process can map them."""

    def checksum(self, block: int, offset: int, length: int) -> int:
        """``kvtransfer.memory.checksum.checksum`` of part of a block."""

    def read(self, block: int, offset: int, out: memoryview) -> int:
        """Copy part of a block into ``out`` (bytes, writable). Returns its checksum."""

    def write(self, block: int, offset: int, data: memoryview) -> int:
        """Overwrite part of a block. Returns the checksum of what was written."""

    def checksum_many(self, blocks: Sequence[int], offset: int, length: int) -> tuple[int, ...]:
        """``checksum`` of the same part of several blocks."""

    def read_many(
        self, blocks: Sequence[int], offset: int, outs: Sequence[memoryview]
    ) -> tuple[int, ...]:
        """``read`` of the same part of several blocks, each into its own; all ``outs`` are alike

        in length.
        """

    def write_many(
        self,
        blocks: Sequence[int],
        offset: int,
        length: int,
        source: memoryview,
        starts: Sequence[int],
    ) -> tuple[int, ...]:
        """``write`` of the same part of several blocks: what begins at ``starts`` of ``source``."""


class PartByPart:
    """The methods for several parts, for memory that gains nothing from them."""

    def checksum_many(
        self: BlockMemory, blocks: Sequence[int], offset: int, length: int
    ) -> tuple[int, ...]:
        """See ``BlockMemory``."""
        return tuple(self.checksum(block, offset, length) for block in blocks)

    def read_many(
        self: BlockMemory, blocks: Sequence[int], offset: int, outs: Sequence[memoryview]
    ) -> tuple[int, ...]:
        """See ``BlockMemory``."""
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
        """See ``BlockMemory``."""
        pairs = zip(blocks, starts, strict=True)
        return tuple(
            self.write(block, offset, source[start : start + length]) for block, start in pairs
        )


def check_part(memory: BlockMemory, block: int, offset: int, length: int) -> None:
    """Raises HandoffError where the memory has no such part: peers name parts, and may be wrong."""
    if not 0 <= block < memory.blocks or not 0 <= offset <= offset + length <= memory.block_bytes:
        raise HandoffError(
            f"no {length} bytes from {offset} of block {block}: there are {memory.blocks} blocks "
            f"of {memory.block_bytes} bytes"
        )
