"""The bytes of a tier's slots: in memory of the host, or in a file.

Each slot's checksum (``kvtransfer.memory.checksum``) is kept in memory from the moment the block is
stored, and verified whenever its bytes are read. Used by one thread that stores and one that loads;
the event loop sees to it that they never use one slot at a time.
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
"""Writes a block's bytes into what it is given; returns their checksum."""
Take = Callable[[memoryview], int]
"""Copies a block's bytes out of what it is given; returns the checksum of what it copied."""


class TierStorage(Protocol):
    """The bytes of one tier's slots. Block sizes are in bytes."""

    def store(self, slot: int, fill: Fill) -> None:
        """Keep what ``fill`` writes. Raises OSError where there is no room for it."""

    def load(self, slot: int, take: Take) -> int:
        """Give a slot's bytes to ``take``; returns their checksum.

        Raises ChecksumMismatch where they are not what was stored, and OSError.
        """

    def expect(self, slots: Iterable[int]) -> None:
        """These will be loaded next."""

    def close(self) -> None:
        """Give everything back; idempotent."""


class HostStorage:
    """``TierStorage`` in memory of the host."""

    def __init__(self, slots: int, block_bytes: int) -> None:
        """Takes all of it at once. Raises ConfigError where the machine has less."""
        self._block_bytes = block_bytes
        self._memory = take_memory(slots * block_bytes, "kv_host_mib")
        self._sums = np.zeros(slots, dtype=np.uint64)

    def store(self, slot: int, fill: Fill) -> None:
        """See ``TierStorage``."""
        with self._part(slot) as part:
            self._sums[slot] = fill(part)

    def load(self, slot: int, take: Take) -> int:
        """See ``TierStorage``."""
        with self._part(slot) as part:
            return _verified(take(part), int(self._sums[slot]))

    def expect(self, slots: Iterable[int]) -> None:
        """There is nothing to prepare."""

    def close(self) -> None:
        """See ``TierStorage``."""
        self._memory.close()

    def _part(self, slot: int) -> memoryview:
        start = slot * self._block_bytes
        return memoryview(self._memory)[start : start + self._block_bytes]


class DiskStorage:
    """``TierStorage`` in a file that has no name, so that it is gone with the process.

    Written and read by calls rather than through a mapping: a full disk or a bad sector is then an
    error that can be handled, where a mapping would end the process with SIGBUS. It takes room on
    the disk only for what was stored.
    """

    def __init__(self, folder: Path, slots: int, block_bytes: int) -> None:
        """Raises ConfigError where the folder cannot be used."""
        self._block_bytes = block_bytes
        self._sums = np.zeros(slots, dtype=np.uint64)
        self._stored, self._loaded = bytearray(block_bytes), bytearray(block_bytes)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            # Without a name, or unlinked as soon as it is open.
            self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        except OSError as error:
            raise ConfigError(
                f"no KV blocks can be kept in {folder} ({error.strerror}); change kv_disk_path, or"
                " set kv_disk_mib to 0"
            ) from error

    def store(self, slot: int, fill: Fill) -> None:
        """See ``TierStorage``."""
        digest = fill(memoryview(self._stored))
        rest, offset = memoryview(self._stored), slot * self._block_bytes
        while rest:
            written = os.pwrite(self._file.fileno(), rest, offset)
            if not written:
                raise OSError("nothing was written")
            rest, offset = rest[written:], offset + written
        self._sums[slot] = digest

    def load(self, slot: int, take: Take) -> int:
        """See ``TierStorage``."""
        rest, offset = memoryview(self._loaded), slot * self._block_bytes
        while rest:
            read = os.preadv(self._file.fileno(), [rest], offset)
            if not read:
                raise OSError("the file is shorter than it was")
            rest, offset = rest[read:], offset + read
        return _verified(take(memoryview(self._loaded)), int(self._sums[slot]))

    def expect(self, slots: Iterable[int]) -> None:
        """See ``TierStorage``."""
        if not hasattr(os, "posix_fadvise"):
            return
        for slot in slots:
            start, advice = slot * self._block_bytes, os.POSIX_FADV_WILLNEED
            os.posix_fadvise(self._file.fileno(), start, self._block_bytes, advice)

    def close(self) -> None:
        """See ``TierStorage``."""
        self._file.close()


def _verified(digest: int, stored: int) -> int:
    if digest != stored:
        raise ChecksumMismatch("a KV block is not what was stored")
    return digest
