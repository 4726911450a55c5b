"""The prefix index without Redis: who holds which blocks, in the memory of the simulation.

The same answers as ``baton.store.prefix_index`` gives; a test asks both.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence


class PrefixDirectory:
    """Block hash → the workers that hold it. Plain Python."""

    def __init__(self) -> None:
        self._holders: dict[bytes, set[str]] = {}

    def apply(self, worker: str, stored: Iterable[bytes], removed: Iterable[bytes]) -> None:
        """A worker tells what it has stored and dropped."""
        for digest in stored:
            self._holders.setdefault(digest, set()).add(worker)
        for digest in removed:
            holders = self._holders.get(digest, set())
            holders.discard(worker)
            if not holders:
                self._holders.pop(digest, None)

    def lookup(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """How many leading blocks of ``hashes`` each worker holds; absent means none.

        A walk down the blocks while anybody holds all up to there.
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
