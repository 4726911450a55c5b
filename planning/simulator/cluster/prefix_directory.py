"""Simulates the prefix index without Redis: keeps the workers of each block in memory.

It gives the same answers as ``baton.store.prefix_index``; a test compares both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixDirectory:
    """Maps block hashes to the workers that hold them. Plain Python."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[str]] = {}

    def __len__(self) -> int:
        """Return the number of pairs of block and worker."""
        return sum(map(len, self._holders.values()))

    def apply(self, worker: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """Record the block hashes that a worker has stored, and those that it has removed."""
        for digest in stored:
            self._holders.setdefault(digest, set()).add(worker)
        for digest in removed:
            holders = self._holders.get(digest, set())
            holders.discard(worker)
            if not holders:
                self._holders.pop(digest, None)

    def lookup(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """Return the number of leading blocks of ``hashes`` that each worker holds. Workers that
        hold none are absent.

        The walk ends at the first block that no worker holds with all blocks before it.
        """
        held: dict[str, int] = {}
        alive: set[str] = set()
        for depth, digest in enumerate(hashes):
            holders = self._holders.get(digest)
            if holders is None:
                found: set[str] = set()
            else:
                found = alive & holders if depth else holders
            if len(found) < len(alive):
                for worker in alive - found:
                    held[worker] = depth
            alive = found
            if not alive:
                return held
        for worker in alive:
            held[worker] = len(hashes)
        return held
