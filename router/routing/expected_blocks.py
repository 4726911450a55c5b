"""Blocks that decisions will create: counted as held until the prefix index tells of them.

Without this, a burst of requests with one new prefix would be spread over workers that all compute
it. Hashes are chained: where a block is expected, all before it are. Plain Python, ``now`` in
milliseconds; owned by the router's event loop.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence

EXPECTED_MS = 2000.0
"""How long after their computing blocks are expected: the event takes a heartbeat at most."""
MAX_BLOCKS = 1_000_000
"""Expected at a time; more are not noted."""


class ExpectedBlocks:
    """See the module's text."""

    def __init__(self) -> None:
        self._workers: dict[bytes, dict[str, float]] = {}
        self._notes: list[tuple[float, int, str, Sequence[bytes]]] = []
        self._count = 0
        self._blocks = 0

    def __len__(self) -> int:
        """Pairs of a block and a worker that are noted, those noted again counted again."""
        return self._blocks

    def expect(self, hashes: Sequence[bytes], worker: str, now: float, wait: float = 0.0) -> None:
        """``worker`` will hold ``hashes``, a prompt's from its first block on, after ``wait``."""
        self._forget(now)
        if not hashes or self._blocks + len(hashes) > MAX_BLOCKS:
            return
        until = now + wait + EXPECTED_MS
        for block in hashes:
            workers = self._workers.setdefault(block, {})
            workers[worker] = max(until, workers.get(worker, 0.0))
        self._count += 1
        heapq.heappush(self._notes, (until, self._count, worker, hashes))
        self._blocks += len(hashes)

    def joined(
        self, held: Mapping[str, int], hashes: Sequence[bytes], now: float
    ) -> dict[str, int]:
        """``held``, the leading blocks of each worker, with what is expected of it."""
        self._forget(now)
        found = dict(held)
        alive: dict[str, float] = {}
        depth = 0
        for block in hashes:
            workers = self._workers.get(block, {})
            if depth and len(workers) < len(alive):
                _raise(found, alive.keys() - workers.keys(), depth)
            alive = workers
            if not workers:
                break
            depth += 1
        _raise(found, alive.keys(), depth)
        return found

    def _forget(self, now: float) -> None:
        while self._notes and self._notes[0][0] <= now:
            until, _, worker, hashes = heapq.heappop(self._notes)
            self._blocks -= len(hashes)
            for block in hashes:
                # Another note of the same moment may have struck it off.
                workers = self._workers.get(block, {})
                if workers.get(worker, until + 1.0) <= until:
                    del workers[worker]
                    if not workers:
                        del self._workers[block]


def _raise(found: dict[str, int], workers: Iterable[str], depth: int) -> None:
    for worker in workers:
        if found.get(worker, 0) < depth:
            found[worker] = depth
