"""Whether a decode worker has room for one more sequence.

Tickets and local prompts follow the same rule. Plain Python; ``now`` is in seconds of any one
clock. Owned by the event loop.
"""

from __future__ import annotations

from baton.errors import HandoffError, NoRoom
from baton.request import AttemptName, SequenceSpec
from engine.scheduling.scheduler import Scheduler

RETRY_AFTER_S = 0.05
"""Seconds after which a writer that found no room may try again: about one decode step."""
_SHARE_OF_PLACES = 0.25
"""Maximum share of a worker's places that a request with many choices needs at a time."""
CLAIM_S = 0.5
"""Seconds after which a claim lapses unless it is renewed: its request has gone elsewhere."""


class Claims:
    """Preempted sequences that wait for room, in order; they come before new ones.

    A claim lasts while its request keeps asking.
    """

    def __init__(self) -> None:
        self._until: dict[AttemptName, float] = {}

    def may_go(self, attempt: AttemptName, now: float) -> bool:
        """Whether no other attempt comes before this one."""
        self._until = {one: until for one, until in self._until.items() if until > now}
        first = next(iter(self._until), attempt)
        return first == attempt

    def make(self, attempt: AttemptName, now: float) -> None:
        """Add an attempt that has found no room; an existing claim keeps its place."""
        self._until[attempt] = now + CLAIM_S

    def drop(self, attempt: AttemptName) -> None:
        """Remove an attempt that has got its room; idempotent."""
        self._until.pop(attempt, None)


class Room:
    """The rule by which tickets and local prompts get room."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._claims = Claims()

    def check(
        self, count: int, pinned: list[int], spec: SequenceSpec, *, promised: int, now: float
    ) -> None:
        """Check the room for one more sequence, in addition to ``promised`` places.

        The sequence needs the cached blocks ``pinned`` and ``count`` more. Preempted sequences come
        first, in the order in which they ask. Raises NoRoom, and HandoffError if there can never be
        room.
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
            raise HandoffError(f"{count} blocks needed: this worker has only {total}")

    def check_count(self, count: int, spec: SequenceSpec, *, promised: int, now: float) -> None:
        """Like ``check``, without a cache lookup: ``count`` blocks must be available.

        It promises nothing, and makes a claim as ``check`` does. Raises NoRoom.
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

        A request with many choices need not have a place for all of them at once. Otherwise it
        would wait until nothing else runs. Beyond a share of the places, its choices take turns.
        """
        scheduler = self._scheduler
        sequences = len(scheduler.running) + len(scheduler.waiting)
        most = scheduler.limits.max_sequences
        wanted = min(choices, max(1, int(most * _SHARE_OF_PLACES)))
        if sequences + promised + wanted > most:
            raise NoRoom("all places of the batch are taken", retry_after=RETRY_AFTER_S)
        if scheduler.has_preempted:
            raise NoRoom("preempted sequences come first", retry_after=RETRY_AFTER_S)
        # One more block for each sequence, so that a new one does not preempt the running ones.
        available = scheduler.pool.available
        if count + sequences > available:
            raise NoRoom(f"{count} blocks needed, {available} available", retry_after=RETRY_AFTER_S)
