"""Whether a decode worker has room for one more sequence.

One rule for tickets and for prompts that the worker computes itself. Plain Python, ``now`` in
seconds of any one clock; owned by the event loop.
"""

from __future__ import annotations

from baton.errors import HandoffError, NoRoom
from baton.request import AttemptName, SequenceSpec
from engine.scheduling.scheduler import Scheduler

RETRY_AFTER_S = 0.05
"""How soon a writer that found no room may ask again: about one decode step."""
_SHARE_OF_PLACES = 0.25
"""Share of a worker's places that a request of many choices needs at a time."""
CLAIM_S = 0.5
"""Seconds after which a claim that is not renewed has lapsed: its request has gone elsewhere."""


class Claims:
    """Preempted sequences that wait for room, in their order; they come before new ones.

    A claim lasts as long as its request asks again and again.
    """

    def __init__(self) -> None:
        self._until: dict[AttemptName, float] = {}

    def may_go(self, attempt: AttemptName, now: float) -> bool:
        """Whether no other attempt comes before this one."""
        self._until = {one: until for one, until in self._until.items() if until > now}
        first = next(iter(self._until), attempt)
        return first == attempt

    def make(self, attempt: AttemptName, now: float) -> None:
        """Add an attempt that has found no room; one that has a claim keeps its place."""
        self._until[attempt] = now + CLAIM_S

    def drop(self, attempt: AttemptName) -> None:
        """Remove an attempt that has its room; idempotent."""
        self._until.pop(attempt, None)


class Room:
    """The rule for tickets and for prompts that the worker computes itself."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._claims = Claims()

    def check(
        self, count: int, pinned: list[int], spec: SequenceSpec, *, promised: int, now: float
    ) -> None:
        """Check the room for one more sequence next to ``promised`` places.

        It needs the cached blocks ``pinned`` and ``count`` more. Preempted sequences come first, in
        the order in which they ask. Raises NoRoom, and HandoffError where there will never be any.
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
        """Check blocks and places. Raises NoRoom.

        A sequence that becomes ``choices`` sequences need not have a place for all at once, or a
        request for many would wait until nothing else runs: beyond a share of the places they take
        turns.
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
