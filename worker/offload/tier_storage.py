"""The bytes of a tier's slots: in host memory, or in a file.

Each slot's checksum (``kvtransfer.memory.checksum``) is kept in memory from the moment the block is
stored, and verified at each read. One thread stores and another one loads. The event loop makes
sure that they never use one slot at the same time.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Protocol

import numpy as np

from baton.errors import ChecksumMismatch, ConfigError
from baton.host.host_memory import take_memory

Fill = Callable[[memoryview], int]
"""Function that writes a block's bytes into the given buffer. Returns the checksum of the bytes."""
Take = Callable[[memoryview], int]
"""Function that copies a block's bytes from the given buffer. Returns the checksum of the copy."""


class TierStorage(Protocol):
    """Holds the bytes of one tier's slots. Block sizes are in bytes."""

    def store(self, slot: int, fill: Fill) -> None:
        """Store a block in a slot: ``fill`` writes its bytes. Raises OSError if there is no room
        for the bytes."""

    def load(self, slot: int, take: Take) -> int:
        """Pass the bytes of a slot to ``take``. Returns their checksum.

        Raises ChecksumMismatch if the bytes differ from the stored ones, and OSError if they cannot
        be read.
        """

    def expect(self, slots: Iterable[int]) -> None:
        """Prepare for loads from these slots. The loads follow soon."""

    def close(self) -> None:
        """Release the memory or the file of the slots; idempotent."""


class HostStorage:
    """Implements ``TierStorage`` in host memory."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        """Allocate the memory of all slots at once. Raises ConfigError if the machine has less
        memory than that."""
        self._block_bytes = block_bytes
        self._memory = take_memory(slots * block_bytes, "kv_host_mib")
        self._sums = np.zeros(slots, dtype=np.uint64)

    def store(self, slot: int, fill: Fill) -> None:
        """Store in a slot of the memory the bytes that ``fill`` writes. See ``TierStorage``."""
        with self._part(slot) as part:
            self._sums[slot] = fill(part)

    def load(self, slot: int, take: Take) -> int:
        """Pass the bytes of a slot to ``take``, and verify their checksum. See ``TierStorage``."""
        with self._part(slot) as part:
            return _verified(take(part), int(self._sums[slot]))

    def expect(self, slots: Iterable[int]) -> None:
        """Do nothing: host memory needs no preparation."""

    def close(self) -> None:
        """Release the memory of all slots; idempotent."""
        self._memory.close()

    def _part(self, slot: int) -> memoryview:
        start = slot * self._block_bytes
        return memoryview(self._memory)[start : start + self._block_bytes]


class DiskStorage:
    """Implements ``TierStorage`` in a file without a name, which disappears with the process.

    It uses read and write calls instead of a mapping. So a full disk or a bad sector is an error
    that can be handled, while a mapping would end the process with SIGBUS. The file takes disk
    space only for blocks that were stored.
    """

    def __init__(self, folder: Path, slots: int, block_bytes: int) -> None:
        """Open the file in ``folder``. Raises ConfigError if the folder cannot be used."""
        self._block_bytes = block_bytes
        self._sums = np.zeros(slots, dtype=np.uint64)
        self._stored, self._loaded = bytearray(block_bytes), bytearray(block_bytes)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # The file has no name, or is unlinked as soon as it is open.
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"cannot keep KV blocks in {folder} ({error.strerror}); change kv_disk_path, or"
                " set kv_disk_mib to 0"
            ) from error

    def store(self, slot: int, fill: Fill) -> None:
        """Store in a slot of the file the bytes that ``fill`` writes. See ``TierStorage``."""
        digest = fill(memoryview(self._stored))
        rest, offset = memoryview(self._stored), slot * self._block_bytes
        while rest:
            written = os.pwrite(self._file.fileno(), rest, offset)
            if not written:
                raise OSError("nothing was written")
            rest, offset = rest[written:], offset + written
        self._sums[slot] = digest

    def load(self, slot: int, take: Take) -> int:
        """Read a slot of the file, pass its bytes to ``take``, and verify their checksum. See
        ``TierStorage``."""
        rest, offset = memoryview(self._loaded), slot * self._block_bytes
        while rest:
            read = os.preadv(self._file.fileno(), [rest], offset)
            if not read:
                raise OSError("the file was truncated")
            rest, offset = rest[read:], offset + read
        return _verified(take(memoryview(self._loaded)), int(self._sums[slot]))

    def expect(self, slots: Iterable[int]) -> None:
        """Let the system read these slots from the disk ahead of their loads. See
        ``TierStorage``."""
        if not hasattr(os, "posix_fadvise"):
            return
        for slot in slots:
            start, advice = slot * self._block_bytes, os.POSIX_FADV_WILLNEED
            os.posix_fadvise(self._file.fileno(), start, self._block_bytes, advice)

    def close(self) -> None:
        """Close the file, which frees its disk space; idempotent."""
        self._file.close()


def _verified(digest: int, stored: int) -> int:
    if digest != stored:
        raise ChecksumMismatch("a KV block differs from what was stored")
    return digest
