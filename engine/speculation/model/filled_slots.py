"""How much of a drafter's part of the KV cache is filled, block by block.

The count lies in the block itself (``DrafterGroup.filled``), so that it is right after a handoff, a
hit in the prefix cache, a fork and a preemption, with nothing to be told. Owned by the engine
thread.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.kv.kv_cache import DrafterGroup
from engine.scheduling.plan import PlanRow


class FilledSlots:
    """Of a cache on the CPU."""

    def __init__(self, group: DrafterGroup) -> None:
        # Numbers of its own, which numpy would make into arrays' at each look.
        self._filled = group.filled.numpy().data
        self.block_size = self._size = group.block_size

    def spoil(self, rows: Iterable[PlanRow]) -> None:
        """The model computes these rows: what the drafter has in their slots is of other tokens."""
        size, filled = self._size, self._filled
        for row in rows:
            first, slot = divmod(row.start, size)
            block = row.block_table[first]
            filled[block] = min(filled[block], slot)
            if slot + row.count > size:
                for block in row.block_table[first + 1 : -(-(row.start + row.count) // size)]:
                    filled[block] = 0

    def count(self, table: Sequence[int], tokens: int, known: int = 0) -> int:
        """How many of the first ``tokens`` tokens are filled without a gap.

        The first ``known`` of them are known to be.
        """
        size = self._size
        place = known // size
        for block in table[place : -(-tokens // size)]:
            found = self._filled[block]
            if found < size:
                return min(tokens, place * size + found)
            place += 1
        return tokens

    def fill(self, table: Sequence[int], start: int, end: int) -> None:
        """Tokens ``start`` … ``end - 1`` are filled, as all before them are."""
        size, filled = self._size, self._filled
        for place in range(start // size, -(-end // size)):
            block = table[place]
            # A shared block may have been filled further for another sequence.
            filled[block] = max(filled[block], min(size, end - place * size))
