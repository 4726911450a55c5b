"""How transports reach KV blocks without knowing what holds them."""

from __future__ import annotations

from typing import Protocol


class BlockMemory(Protocol):
    """The bytes of a worker's blocks. Called from transfer threads, never from an event loop."""

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""

    def read(self, block: int, offset: int, length: int) -> bytes:
        """A copy of part of a block."""

    def write(self, block: int, offset: int, data: bytes) -> None:
        """Overwrite part of a block."""
