"""Blocks of this worker as a receiver with another geometry has them, converted as they are read.

They are read by transfer threads, one after another, so that no more than a few of them exist at a
time. A block that is sent in several parts is kept from the first to the last of them, if there is
room for it; else it is converted again.
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
    """Converted blocks of which parts are still to be read. Safe among threads."""

    def __init__(self, limit_bytes: int) -> None:
        """Holds so many bytes, or one block if that has more."""
        self._limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[tuple[ConvertedBlocks, int], npt.NDArray[np.uint8]] = (
            OrderedDict()
        )

    @property
    def bytes(self) -> int:
        """Bytes that are held."""
        with self._lock:
            return sum(data.nbytes for data in self._blocks.values())

    def take(self, owner: ConvertedBlocks, block: int) -> npt.NDArray[np.uint8] | None:
        """A block, which is held no longer; None where it was not."""
        with self._lock:
            return self._blocks.pop((owner, block), None)

    def put(self, owner: ConvertedBlocks, block: int, data: npt.NDArray[np.uint8]) -> None:
        """Hold a block, in place of those held longest if there are too many."""
        with self._lock:
            held = sum(data.nbytes for data in self._blocks.values())
            while self._blocks and held + data.nbytes > self._limit_bytes:
                held -= self._blocks.popitem(last=False)[1].nbytes
            self._blocks[owner, block] = data

    def drop(self, owner: ConvertedBlocks) -> None:
        """Hold no block of ``owner`` any more."""
        with self._lock:
            for key in [key for key in self._blocks if key[0] is owner]:
                del self._blocks[key]


class ConvertedBlocks(PartByPart):
    """``kvtransfer.memory.memory.BlockMemory`` over one sequence, to read only.

    Block n is the nth block of the sequence as the receiver counts them.
    """

    def __init__(self, cache: KvCache, target: Geometry, staging: Staging) -> None:
        """``staging`` is that of all conversions of the worker.

        Raises GeometryMismatch, which names both sides, where ``cache`` cannot be converted.
        """
        source, self._layout = KvLayout.of(cache.geometry), KvLayout.of(target)
        if target.tensor_parallel != 1:
            raise GeometryMismatch(
                f"blocks go to one rank, and the target has {target}; the source has "
                f"{cache.geometry}"
            )
        self._converter = Converter(source, self._layout)
        self._cache = cache
        self._staging = staging
        device = cache.bytes.device
        # Of its own: on the default stream a conversion would wait for the engine's steps.
        self._stream = (
            torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            if device.type == "cuda"
            else None
        )
        self._computed: tuple[tuple[int, ...], int] = ((), 0)
        self._closed = False

    def computed(self, table: Sequence[int], tokens: int) -> None:
        """The sequence has the block table ``table`` here, and ``tokens`` computed tokens.

        They can be read from now on; a block of which more tokens will come must not be.
        """
        self._computed = (tuple(table), tokens)

    def close(self) -> None:
        """Nothing of it is read any more; idempotent."""
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
        """Raises HandoffError: there is no place where all of them lie."""
        raise HandoffError("converted blocks have no address")

    @property
    def shared_file(self) -> SharedFile | None:
        return None

    def checksum(self, block: int, offset: int, length: int) -> int:
        return copying.checksum(self._part(block, offset, length))

    def read(self, block: int, offset: int, out: memoryview) -> int:
        return copying.copy(out, self._part(block, offset, out.nbytes), soon_read=True)

    def write(self, block: int, offset: int, data: memoryview) -> int:
        """Raises HandoffError: what is converted is only read."""
        raise HandoffError("converted blocks cannot be written")

    def _part(self, block: int, offset: int, length: int) -> npt.NDArray[np.uint8]:
        check_part(self, block, offset, length)
        data = self._staging.take(self, block)
        if data is None:
            data = self._convert(block)
        # Parts come in their order.
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
