"""Steps that bring each running sequence its next token and nothing else, taken in many at a time.

For simulators: no engine hears of them. Plain Python, owned by a scheduler.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from engine.block_pool import BlockPool
from engine.findable_blocks import FindableBlocks
from engine.scheduler_limits import SchedulerLimits
from engine.sequence import Sequence as EngineSequence
from engine.sequence_bounds import SequenceBounds


class IdenticalSteps:
    """Counts them, and leaps over them, for the running sequences of a scheduler."""

    __slots__ = ("_bounds", "_findable", "_limits", "_pool")

    def __init__(
        self,
        pool: BlockPool,
        limits: SchedulerLimits,
        bounds: SequenceBounds,
        findable: FindableBlocks,
    ) -> None:
        self._pool = pool
        self._limits = limits
        self._bounds = bounds
        self._findable = findable

    def count(self, running: Sequence[EngineSequence], depth: int) -> int:
        """How many lie ahead, where each of ``depth`` plans in flight has all that run."""
        if not depth or not running or not self._is_steady(running, depth):
            return 0
        most = min(self._bounds.most_tokens(one) - one.target for one in running)
        available = self._pool.available
        if most <= 0 or self._growth(running, most) <= available:
            return max(0, most)
        steps = range(most + 1)
        return bisect_right(steps, available, key=lambda n: self._growth(running, n)) - 1

    def leap(
        self,
        running: Sequence[EngineSequence],
        steps: int,
        token_of: Callable[[EngineSequence], int],
    ) -> None:
        """Take in ``steps`` results, and make as many plans.

        Blocks become full and are given in the order of the steps: so what is evicted meanwhile,
        and what is held already, is what it would have been.
        """
        events: list[tuple[int, bool, int]] = []
        computed = [len(one.token_ids) - 1 for one in running]
        for place, sequence in enumerate(running):
            events += self._events(sequence, place, steps)
            sequence.token_ids.extend((token_of(sequence),) * steps)
            sequence.scheduled += steps
            sequence.highest += steps
        for step, is_given, place in sorted(events):
            sequence = running[place]
            if is_given:
                sequence.block_table += self._pool.allocate(1)
            else:
                sequence.computed = computed[place] + step
                self._findable.register(sequence)
        for sequence in running:
            sequence.computed = len(sequence.token_ids) - 1

    def _events(
        self, sequence: EngineSequence, place: int, steps: int
    ) -> Iterator[tuple[int, bool, int]]:
        """In which step a block becomes full (False), and in which it is given one (True)."""
        size = self._limits.block_size
        known = len(sequence.token_ids) - 1
        for step in range(size - known % size, steps + 1, size):
            yield step, False, place
        first = len(sequence.block_table) * size - sequence.target + 2
        for step in range(first, steps + 1, size):
            yield step, True, place

    def _is_steady(self, running: Sequence[EngineSequence], depth: int) -> bool:
        """Whether every plan in flight brings each of them its next token, whatever that is."""
        limits = self._limits
        if limits.draft_tokens or len(running) > limits.chunk_tokens:
            return False
        return all(
            one.in_flight == one.pending == one.scheduled - one.computed == depth
            and one.scheduled - depth >= len(one.spec.token_ids)
            and not (one.prefill_only or one.siblings or one.stop_ids)
            for one in running
        )

    def _growth(self, running: Sequence[EngineSequence], steps: int) -> int:
        """Blocks that so many steps give them."""
        size = self._limits.block_size
        return sum(
            max(0, -(-(one.target - 1 + steps) // size) - len(one.block_table)) for one in running
        )
