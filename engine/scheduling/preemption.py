"""Who loses its blocks when they run out: whoever costs least, but nobody for ever.

Plain Python, without clock: data in, data out.
"""

from __future__ import annotations

from collections.abc import Sequence as Several

from engine.scheduling.block_pool import BlockPool
from engine.scheduling.sequence import Sequence

PATIENCE = 3
"""A sequence that has lost its blocks so often comes before all that have not, whatever their
priorities: so even the lowest one ends."""
CACHED_SHARE = 0.25
"""What a token costs whose block can be found again, against one that must be computed: the blocks
are the first to be used by others, and then they cannot."""


def victim_of(candidates: Several[Sequence], pool: BlockPool, block_size: int) -> Sequence:
    """The one to lose its blocks; there is at least one.

    The lowest priority; of equals who has lost its blocks less often; then who is cheapest to bring
    back; then the last of ``candidates``, which stand in the order of their arrival. So one of them
    is not chosen while others are there: it ends, and leaves its blocks to the next.
    """

    def rank(place: int) -> tuple[bool, int, int, float, int]:
        one = candidates[place]
        has_waited = one.preemptions >= PATIENCE
        level = 0 if has_waited else -one.spec.priority
        return has_waited, level, one.preemptions, recompute_cost(one, pool, block_size), -place

    return candidates[min(range(len(candidates)), key=rank)]


def recompute_cost(sequence: Sequence, pool: BlockPool, block_size: int) -> float:
    """What it takes to bring a sequence back, in tokens to compute.

    Of its full blocks those that others use stay where they are, and cost nothing.
    """
    full = sequence.block_table[: sequence.registered]
    own = sum(not pool.is_shared(block) for block in full)
    rest = max(0, sequence.computed - sequence.registered * block_size)
    return rest + CACHED_SHARE * own * block_size
