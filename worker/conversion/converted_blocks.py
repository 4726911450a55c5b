"""Blocks of this worker in the geometry of a receiver, converted while they are read.

Transfer threads read them one after another, so only a few exist at a time. A block that is sent in
several parts is kept from its first to its last part, if there is room for it. Otherwise it is
converted again.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import numpy.typing as npt
import torch

from baton.errors import GeometryMismatch, HandoffError
from baton.request import Geometry
from engine.kv.kv_cache import KvCache
from kvtransfer.layout.layout import KvLayout
from kvtransfer.memory import copying
from kvtransfer.memory.memory import PartByPart, SharedFile, check_part
from worker.conversion.kv_converter import Converter


class Staging:
    """Converted blocks that are kept because some of their parts were not read yet. Thread-safe."""

    def __init__(self, limit_bytes: int) -> None:
        """``limit_bytes`` is the maximum size of all kept blocks together. A single block is kept
        even if it is larger."""
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[ConvertedBlocks, int], npt.NDArray[np.uint8]] = (
            OrderedDict()
        )

    @property
    def bytes(self) -> int:
        """Number of bytes in the kept blocks."""
        with self._lock:
            return sum(data.nbytes for data in self._blocks.values())

    def take(self, owner: ConvertedBlocks, block: int) -> npt.NDArray[np.uint8] | None:
        """Remove and return converted block ``block`` of a sequence (``owner``); None if it is not
        kept."""
        with self._lock:
            return self._blocks.pop((owner, block), None)

    def put(self, owner: ConvertedBlocks, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Keep converted block ``block`` of a sequence (``owner``). Drops the oldest blocks if
        there are too many."""
        with self._lock:
            held = sum(data.nbytes for data in self._blocks.values())
            while self._blocks and held + data.nbytes > self._limit_bytes:
                held -= self._blocks.popitem(last=False)[1].nbytes
            self._blocks[owner, block] = data

    def drop(self, owner: ConvertedBlocks) -> None:
        """Drop all kept blocks of a sequence (``owner``)."""
        with self._lock:
            for key in [key for key in self._blocks if key[0] is owner]:
                del self._blocks[key]


class ConvertedBlocks(PartByPart):
    """A sequence's blocks, converted to a receiver's geometry. Implements
    ``kvtransfer.memory.memory.BlockMemory``, read-only.

    Block n is the nth block of the sequence in the receiver's block size.
    """

    def __init__(self, cache: KvCache, target: Geometry, staging: Staging) -> None:
        """``cache`` holds the blocks, and ``target`` is the receiver's geometry. ``staging`` keeps
        converted blocks for all receivers of this worker.

        Raises GeometryMismatch, with both geometries, if blocks of ``cache`` cannot be
        converted.
        """
        source, self._layout = KvLayout.of(cache.geometry), KvLayout.of(target)
        if target.tensor_parallel != 1:
            raise GeometryMismatch(
                f"blocks are converted for one rank only, and the target has {target};"
                f" the source has {cache.geometry}"
            )
        self._converter = Converter(source, self._layout)
        self._cache = cache
        self._staging = staging
        device = cache.bytes.device
        # A stream of its own: on the default stream a conversion would wait for the engine's steps.
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )
        self._computed: tuple[tuple[int, ...], int] = ((), 0)
        self._closed = False

    def computed(self, table: Sequence[int], tokens: int) -> None:
        """Set the sequence's block table on this worker, and the number of its computed tokens.

        The KV of these tokens can be read from now on. A block to which tokens are still added must
        not be read.
        """
        self._computed = (tuple(table), tokens)

    def close(self) -> None:
        """Declare that the blocks are no longer read, and drop those in the staging memory;
        idempotent."""
        self._closed = True
        self._staging.drop(self)

    @property
    def blocks(self) -> int:
        return -(-self._computed[1] // self._layout.block_size)

    @property
    def block_bytes(self) -> int:
        return self._layout.block_bytes

    @property
    def device(self) -> str:
        return "cpu"

    @property
    def address(self) -> int:
        """Raise HandoffError: converted blocks have no common address, because they are made one at
        a time."""
        raise HandoffError("converted blocks have no address")

    @property
    def shared_file(self) -> SharedFile | None:
        return None

    def checksum(self, block: int, offset: int, length: int) -> int:
        return copying.checksum(self._part(block, offset, length))

    def read(self, block: int, offset: int, out: memoryview) -> int:
        return copying.copy(out, self._part(block, offset, out.nbytes), soon_read=True)

    def write(self, block: int, offset: int, data: memoryview) -> int:
        """Raise HandoffError: converted blocks are read-only."""
        raise HandoffError("converted blocks cannot be written")

    def _part(self, block: int, offset: int, length: int) -> npt.NDArray[np.uint8]:
        check_part(self, block, offset, length)
        data = self._staging.take(self, block)
        if data is None:
            data = self._convert(block)
        # Parts arrive in order.
        if offset + length < self.block_bytes and not self._closed:
            self._staging.put(self, block, data)
        return data[offset : offset + length]

    def _convert(self, block: int) -> npt.NDArray[np.uint8]:
        table, tokens = self._computed
        source = self._cache.bytes
        with self._on_stream():
            out = torch.empty((1, self.block_bytes), dtype=torch.uint8, device=source.device)
            self._converter.convert(source, table, tokens, [block], out)
            found: npt.NDArray[np.uint8] = out[0].cpu().numpy()
            return found

    def _on_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)
