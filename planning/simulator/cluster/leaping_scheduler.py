"""The workers' scheduler, which also leaps over identical steps: many at once, in one call.

A step is identical to the one before it where it brings each running sequence its next token and
does nothing else. Plain Python; owned by a simulated worker.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator

from engine.scheduling.scheduler import Scheduler
from engine.scheduling.sequence import Sequence


class LeapingScheduler(Scheduler):
    """See the module's text."""

    def identical_steps(self) -> int:
        """How many identical steps lie ahead; 0 where there is none.

        So many results may come and so many plans be made, each with the rows that are in flight
        now, as long as no sequence is added or removed from outside.
        """
        plans, running = self._plans.values(), self.running
        depth, count = len(plans), len(running)
        if self.waiting or self._leaving or any(len(plan.rows) != count for plan in plans):
            return 0
        if not depth or not running or not self._is_steady(depth):
            return 0
        most = min(self._bounds.max_tokens(one) - one.target for one in running)
        available = self.pool.available
        if most <= 0 or self._growth(most) <= available:
            return max(0, most)
        return bisect_right(range(most + 1), available, key=self._growth) - 1

    def leap(self, steps: int, token_of: Callable[[Sequence], int]) -> None:
        """Take in ``steps`` results and make as many plans; at most ``identical_steps`` of them.

        Each of a sequence's tokens is ``token_of`` it. The plans in flight stay what they are, but
        their rows begin ``steps`` tokens later. Blocks become full and are allocated in the order
        of the steps, so that the cache holds and evicts what it would step by step.
        """
        running = self.running
        events: list[tuple[int, bool, int]] = []
        computed = [len(one.token_ids) - 1 for one in running]
        for place, sequence in enumerate(running):
            events += self._events(sequence, place, steps)
            sequence.token_ids.extend((token_of(sequence),) * steps)
            sequence.scheduled += steps
            sequence.highest += steps
        for step, is_allocated, place in sorted(events):
            sequence = running[place]
            if is_allocated:
                sequence.block_table += self.pool.allocate(1)
            else:
                sequence.computed = computed[place] + step
                self._prefix_cache.register(sequence)
        for sequence in running:
            sequence.computed = len(sequence.token_ids) - 1

    def _events(
        self, sequence: Sequence, place: int, steps: int
    ) -> Iterator[tuple[int, bool, int]]:
        """In which steps a block becomes full (False), and in which one is allocated (True)."""
        size = self.limits.block_size
        known = len(sequence.token_ids) - 1
        for step in range(size - known % size, steps + 1, size):
            yield step, False, place
        first = len(sequence.block_table) * size - sequence.target + 2
        for step in range(first, steps + 1, size):
            yield step, True, place

    def _is_steady(self, depth: int) -> bool:
        """Whether each of ``depth`` plans in flight brings all that run their next token.

        True only where the token's value does not matter.
        """
        limits = self.limits
        if limits.draft_tokens or len(self.running) > limits.chunk_tokens:
            return False
        return all(
            one.in_flight == one.pending == one.scheduled - one.computed == depth
            and one.scheduled - depth >= len(one.spec.token_ids)
            and not (one.prefill_only or one.siblings or one.stop_ids)
            for one in self.running
        )

    def _growth(self, steps: int) -> int:
        """How many blocks the running sequences are allocated in so many steps."""
        size = self.limits.block_size
        return sum(
            max(0, -(-(one.target - 1 + steps) // size) - len(one.block_table))
            for one in self.running
        )
