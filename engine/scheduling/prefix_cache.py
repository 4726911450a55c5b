"""The prefix cache: blocks of a pool that sequences find, and make findable, by their hashes.

Plain Python, owned by the engine core.
"""

from __future__ import annotations

from baton.hashing import last_hashes
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.sequence import SchedulerLimits, Sequence


class PrefixCache:
    """Finds, registers and exchanges blocks of a pool for a scheduler's sequences."""

    __slots__ = ("_limits", "_pool")

    def __init__(self, pool: BlockPool, limits: SchedulerLimits) -> None:
        self._pool = pool
        self._limits = limits

    def prefix_of(self, sequence: Sequence) -> list[int]:
        """The blocks of the longest known prefix of a sequence that has none of its own.

        The last token is computed in any case, since its logits are needed, and it is never
        written into a shared block: at most the blocks before it are taken.
        """
        if sequence.scores_prompt:
            # What is scored is computed: its logits are needed.
            return []
        most = (len(sequence.token_ids) - 1) // self._limits.block_size
        hashes = sequence.full_hashes(self._limits.hash_block)
        return self._pool.match(last_hashes(hashes, self._limits.hashes_per_block)[:most])

    def deduplicate(self, sequence: Sequence) -> None:
        """Exchange blocks whose contents were held already. Only for sequences not in flight."""
        for index in range(sequence.registered):
            own = sequence.block_table[index]
            holder = self._make_findable(sequence, index)
            if holder != own:
                self._pool.pin([holder])
                sequence.block_table[index] = holder
                # The block stays the sequence's until it is released: that may raise.
                sequence.spare.append(own)
                self._pool.release([own])
                sequence.spare.remove(own)

    def register(self, sequence: Sequence) -> None:
        """Make the blocks that have become full findable. Equal contents stay with their holder."""
        full = sequence.computed // self._limits.block_size
        if full <= sequence.registered:
            return
        sequence.full_hashes(self._limits.hash_block)
        for index in range(sequence.registered, full):
            self._make_findable(sequence, index)
        sequence.registered = full

    def _make_findable(self, sequence: Sequence, index: int) -> int:
        """See ``BlockPool.register``."""
        count = self._limits.hashes_per_block
        *leading, last = sequence.hashes[index * count : (index + 1) * count]
        ttl_s = sequence.spec.cache_ttl_s
        return self._pool.register(sequence.block_table[index], last, leading, ttl_s)
