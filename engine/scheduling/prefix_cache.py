"""The prefix cache: lets sequences find blocks by their hashes, and register their own.

Plain Python, owned by the engine core.
"""

from __future__ import annotations

from baton.hashing import last_hashes
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.sequence import SchedulerLimits, Sequence


class PrefixCache:
    """Finds, registers and deduplicates blocks of a pool for a scheduler's sequences."""

    __slots__ = ("_limits", "_pool")

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self._pool = pool
        self._limits = limits

    def prefix_of(self, sequence: Sequence) -> list[int]:
        """Return the cached blocks of the longest known prefix of a sequence that has no blocks
        yet.

        The block of the last token is never taken. That token is always computed, because its
        logits are needed, and it must not be written into a shared block.
        """
        if sequence.scores_prompt:
            # Scored tokens must be computed, because their logits are needed.
            return []
        most = (len(sequence.token_ids) - 1) // self._limits.block_size
        hashes = sequence.full_hashes(self._limits.hash_block)
        return self._pool.match(last_hashes(hashes, self._limits.hashes_per_block)[:most])

    def deduplicate(self, sequence: Sequence) -> None:
        """Replace a sequence's blocks by cached ones with the same contents. No plan in flight may
        have a row for the sequence."""
        table = [*sequence.block_table]
        try:
            for index in range(sequence.registered):
                own = table[index]
                holder = self._make_findable(sequence, index)
                if holder != own:
                    self._pool.pin([holder])
                    table[index] = holder
                    # The sequence keeps the block until it is released: the release may raise.
                    sequence.spare.append(own)
                    self._pool.release([own])
                    sequence.spare.remove(own)
        finally:
            sequence.block_table = (*table,)

    def register(self, sequence: Sequence) -> None:
        """Make a sequence's newly filled blocks findable by hash. If the cache already has a block
        with the same contents, that block stays the one that is found."""
        full = sequence.computed // self._limits.block_size
        if full <= sequence.registered:
            return
        sequence.full_hashes(self._limits.hash_block)
        for index in range(sequence.registered, full):
            self._make_findable(sequence, index)
        sequence.registered = full

    def _make_findable(self, sequence: Sequence, index: int) -> int:
        """Make one block of a sequence findable by hash. Returns the block that is found: see
        ``BlockPool.register``."""
        count = self._limits.hashes_per_block
        *leading, last = sequence.hashes[index * count : (index + 1) * count]
        ttl_s = sequence.spec.cache_ttl_s
        return self._pool.register(sequence.block_table[index], last, leading, ttl_s)
