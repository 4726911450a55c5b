"""A rank's blocks as one of its peers sees them: the bytes that both share, packed.

``kvtransfer.layout.shard_layout`` defines packed bytes. The checksum of a part of them is the sum
of the checksums of its planes, each multiplied by an odd number that belongs to the plane. So no
plane can pass for another, and both ends compute the same checksum wherever the planes are.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby

import numpy as np
import numpy.typing as npt

from kvtransfer.layout.shard_layout import Plane, ShardLayout
from kvtransfer.memory import copying
from kvtransfer.memory.memory import BlockMemory, HostMemory, PartByPart, SharedFile, check_part

_PLANE_FACTOR = 0xA0761D6478BD642F
_MASK64 = (1 << 64) - 1


def plane_factor(number: int) -> int:
    """Return the odd factor of a plane. Its checksum is multiplied by this factor in the checksum
    of a part."""
    return (number + 1) * _PLANE_FACTOR & _MASK64 | 1


@dataclass(frozen=True, slots=True)
class _Cut:
    """Pieces of equal length into which a part of the packed bytes is divided."""

    length: int
    at: npt.NDArray[np.int64]
    """Offset in the part at which each piece begins."""
    places: npt.NDArray[np.int64]
    """Offset in the block at which each piece begins."""
    factors: npt.NDArray[np.uint64]


class Pieces:
    """Maps offsets in the packed bytes to offsets in a block. Thread-safe."""

    def __init__(self, planes: Sequence[Plane]) -> None:
        self._planes = planes
        self.cuts = lru_cache(maxsize=256)(self._cuts)
        """Cached function that divides a part into pieces, grouped by length. Its arguments are the
        part's ``(offset, length)`` in packed bytes."""

    def of(self, offset: int, length: int) -> list[Plane]:
        """Return the planes, or pieces of planes, that contain the ``length`` packed bytes from
        ``offset`` on."""
        found = []
        for plane in self._planes:
            first = max(offset, plane.packed)
            last = min(offset + length, plane.packed + plane.length)
            if first < last:
                place = plane.place + first - plane.packed
                found.append(Plane(plane.number, first, place, last - first))
        return found

    def _cuts(self, offset: int, length: int) -> tuple[_Cut, ...]:
        pieces = sorted(self.of(offset, length), key=lambda piece: (piece.length, piece.number))
        cuts = []
        for size, alike in groupby(pieces, lambda piece: piece.length):
            group = list(alike)
            cuts.append(
                _Cut(
                    size,
                    np.array([piece.packed - offset for piece in group], dtype=np.int64),
                    np.array([piece.place for piece in group], dtype=np.int64),
                    np.array([plane_factor(piece.number) for piece in group], dtype=np.uint64),
                )
            )
        return tuple(cuts)


class ShardMemory(PartByPart):
    """Implements ``kvtransfer.memory.memory.BlockMemory`` over packed bytes of another memory."""

    def __init__(self, memory: BlockMemory, planes: Sequence[Plane], block_bytes: int) -> None:
        """``planes`` have offsets in blocks of ``memory``. ``block_bytes`` is the total size of the
        planes of one block."""
        self._memory = memory
        self._pieces = Pieces(planes)
        self._block_bytes = block_bytes
        # Parts come by the dozen, each with hundreds of pieces: one call copies all, if the CPU
        # copies.
        self._host = memory if isinstance(memory, HostMemory) else None

    @property
    def blocks(self) -> int:
        return self._memory.blocks

    @property
    def block_bytes(self) -> int:
        return self._block_bytes

    @property
    def device(self) -> str:
        return self._memory.device

    @property
    def address(self) -> int:
        """Address of the whole blocks. The packed bytes have no address of their own."""
        return self._memory.address

    @property
    def shared_file(self) -> SharedFile | None:
        return self._memory.shared_file

    # One block at a time

    def checksum(self, block: int, offset: int, length: int) -> int:
        return self._sum(
            (piece, self._memory.checksum(block, piece.place, piece.length))
            for piece in self._pieces_of(block, offset, length)
        )

    def read(self, block: int, offset: int, out: memoryview) -> int:
        return self._sum(
            (piece, self._memory.read(block, piece.place, _part(out, piece, offset)))
            for piece in self._pieces_of(block, offset, out.nbytes)
        )

    def write(self, block: int, offset: int, data: memoryview) -> int:
        return self._sum(
            (piece, self._memory.write(block, piece.place, _part(data, piece, offset)))
            for piece in self._pieces_of(block, offset, data.nbytes)
        )

    def _sum(self, found: Iterable[tuple[Plane, int]]) -> int:
        return sum(plane_factor(piece.number) * digest for piece, digest in found) & _MASK64

    def _pieces_of(self, block: int, offset: int, length: int) -> list[Plane]:
        check_part(self, block, offset, length)
        return self._pieces.of(offset, length)

    # Many blocks at a time

    def checksum_many(self, blocks: Sequence[int], offset: int, length: int) -> tuple[int, ...]:
        if self._host is None:
            return super().checksum_many(blocks, offset, length)
        sums = np.zeros(len(blocks), dtype=np.uint64)
        for cut in self._cuts_for(blocks, offset, length):
            starts = _starts(blocks, self._host.block_bytes, cut)
            _add(sums, cut, copying.checksum_many(self._host.data, starts, cut.length))
        return tuple(sums.tolist())

    def read_many(
        self,
        blocks: Sequence[int],
        offset: int,
        outs: Sequence[memoryview],
    ) -> tuple[int, ...]:
        if self._host is None:
            return super().read_many(blocks, offset, outs)
        sums = np.zeros(len(blocks), dtype=np.uint64)
        for cut in self._cuts_for(blocks, offset, outs[0].nbytes):
            starts = _starts(blocks, self._host.block_bytes, cut)
            found = copying.copy_out(outs, self._host.data, starts, cut.length, cut.at)
            _add(sums, cut, found)
        return tuple(sums.tolist())

    def write_many(
        self,
        blocks: Sequence[int],
        offset: int,
        length: int,
        source: memoryview,
        starts: Sequence[int],
    ) -> tuple[int, ...]:
        if self._host is None:
            return super().write_many(blocks, offset, length, source, starts)
        origin = np.frombuffer(source, dtype=np.uint8)
        sums = np.zeros(len(blocks), dtype=np.uint64)
        for cut in self._cuts_for(blocks, offset, length):
            origins = (np.array(starts, dtype=np.int64)[:, None] + cut.at).reshape(-1)
            places = _starts(blocks, self._host.block_bytes, cut)
            found = copying.copy_many(self._host.data, places, origin, origins, cut.length)
            _add(sums, cut, found)
        return tuple(sums.tolist())

    def copy_from(
        self, blocks: Sequence[int], offset: int, length: int, theirs: PeerBlocks
    ) -> tuple[int, ...]:
        """Copy the same part of several blocks of another worker (``theirs``) into as many blocks
        of this memory.

        Returns the checksum of each part.
        """
        assert self._host is not None, "only blocks in host memory can be copied"
        sums = np.zeros(len(blocks), dtype=np.uint64)
        here, there = self._cuts_for(blocks, offset, length), theirs.pieces.cuts(offset, length)
        for own, other in zip(here, there, strict=True):
            places = _starts(blocks, self._host.block_bytes, own)
            starts = _starts(theirs.blocks, theirs.block_bytes, other)
            found = copying.copy_many(self._host.data, places, theirs.data, starts, own.length)
            _add(sums, own, found)
        return tuple(sums.tolist())

    def _cuts_for(self, blocks: Sequence[int], offset: int, length: int) -> tuple[_Cut, ...]:
        check_part(self, min(blocks), offset, length)
        check_part(self, max(blocks), offset, length)
        return self._pieces.cuts(offset, length)


@dataclass(frozen=True, slots=True)
class PeerBlocks:
    """Some blocks of another worker, whose memory is mapped in this process."""

    data: npt.NDArray[np.uint8]
    """All of the other worker's memory for blocks, uint8 [bytes]."""
    block_bytes: int
    pieces: Pieces
    blocks: Sequence[int]


def source_memory(memory: BlockMemory, shard: ShardLayout | None) -> BlockMemory:
    """Return a writer's blocks as one of its peers sees them: packed by ``shard``, or unchanged if
    blocks are sent whole."""
    if shard is None or shard.is_whole:
        return memory
    return ShardMemory(memory, shard.source_planes, shard.block_bytes)


def target_memory(memory: BlockMemory, shard: ShardLayout | None) -> BlockMemory:
    """Return a receiver's blocks as one of its peers sees them: packed by ``shard``, or unchanged
    if blocks arrive whole."""
    if shard is None or shard.is_whole:
        return memory
    return ShardMemory(memory, shard.target_planes, shard.block_bytes)


def _starts(blocks: Sequence[int], block_bytes: int, cut: _Cut) -> npt.NDArray[np.int64]:
    """Return the offset in the memory at which each piece of each block begins. ``cut`` has the
    offsets of the pieces in a block."""
    return (np.array(blocks, dtype=np.int64)[:, None] * block_bytes + cut.places).reshape(-1)


def _part(data: memoryview, piece: Plane, offset: int) -> memoryview:
    at = piece.packed - offset
    return data.cast("B")[at : at + piece.length]


def _add(sums: npt.NDArray[np.uint64], cut: _Cut, found: Sequence[int]) -> None:
    digests = np.array(found, dtype=np.uint64).reshape(len(sums), len(cut.factors))
    sums += (digests * cut.factors).sum(axis=1, dtype=np.uint64)
