"""Whether a decode worker has room for one more sequence.

One rule for tickets and for prompts that the worker computes itself. Plain Python, ``now`` in
seconds of any one clock; owned by the control loop.
"""

from __future__ import annotations

from baton.errors import HandoffError, NoRoom
from baton.request import SequenceSpec
from decode_worker.claims import Claims
from engine.scheduling.scheduler import Scheduler

RETRY_AFTER_S = 0.05
"""How soon a writer that found no room may ask again: about one decode step."""
_SHARE_OF_PLACES = 0.25
"""Of a worker's places: so many must be free for a request of as many choices."""


class Room:
    """See the module's text."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._claims = Claims()

    def check(
        self, count: int, pinned: list[int], spec: SequenceSpec, *, promised: int, now: float
    ) -> None:
        """For one more sequence, of the cached blocks ``pinned`` and ``count`` more, beside

        ``promised`` places.

        Those that have lost their blocks before come first, in the order in which they ask. Raises
        NoRoom, and HandoffError where there will never be any.
        """
        self.check_ever(count + len(pinned))
        self.check_count(
            count + self._scheduler.pool.evictable(pinned), spec, promised=promised, now=now
        )
        self._claims.drop((spec.request_id, spec.attempt))

    def check_ever(self, count: int) -> None:
        """Check that the worker has ``count`` blocks in total. Raises HandoffError."""
        total = self._scheduler.pool.total
        if count > total:
            raise HandoffError(f"{count} blocks wanted: this worker has {total}")

    def check_count(self, count: int, spec: SequenceSpec, *, promised: int, now: float) -> None:
        """Like ``check``, without a look at the cache: ``count`` blocks must be available.

        It promises nothing, and claims as ``check`` does. Raises NoRoom.
        """
        attempt = (spec.request_id, spec.attempt)
        try:
            if not self._claims.may_go(attempt, now):
                raise NoRoom("preempted sequences come first", retry_after=RETRY_AFTER_S)
            self._check(count, spec.choices, promised)
        except NoRoom:
            if spec.preemptions:
                self._claims.make(attempt, now)
            raise

    def _check(self, count: int, choices: int, promised: int) -> None:
        """A sequence that becomes ``choices`` sequences need not have a place for all at once, or a

        request for many would wait until nothing else runs: beyond a share of the places they take
        turns. Raises NoRoom.
        """
        scheduler = self._scheduler
        sequences = len(scheduler.running) + len(scheduler.waiting)
        most = scheduler.limits.max_sequences
        wanted = min(choices, max(1, int(most * _SHARE_OF_PLACES)))
        if sequences + promised + wanted > most:
            raise NoRoom("every sequence's place is taken", retry_after=RETRY_AFTER_S)
        if scheduler.has_preempted:
            raise NoRoom("preempted sequences come first", retry_after=RETRY_AFTER_S)
        # One block more for each sequence, so that a new one does not preempt the running ones.
        available = scheduler.pool.available
        if count + sequences > available:
            raise NoRoom(f"{count} blocks wanted, {available} available", retry_after=RETRY_AFTER_S)
