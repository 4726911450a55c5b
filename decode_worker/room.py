"""Whether a decode worker has room for one more sequence.

Tickets and local prompts follow the same rule. Plain Python; ``now`` is in seconds of any one
clock. Owned by the event loop.
"""

from __future__ import annotations

from baton.errors import HandoffError, NoRoom
from baton.request import AttemptName, SequenceSpec
from engine.scheduling.scheduler import Scheduler

RETRY_AFTER_S = 0.05
"""Seconds after which a request that found no room may try again: about one decode step."""
_SHARE_OF_PLACES = 0.25
"""Maximum share of the batch's places that must be free before a request with many choices is
admitted."""
CLAIM_S = 0.5
"""Seconds after which the claim of a preempted sequence lapses unless it is renewed. A lapsed claim
means that the router has placed the request on another worker."""


class Claims:
    """Attempts of preempted sequences that wait for room, in order; they come before new sequences.

    A claim lasts while the router keeps trying to place the sequence on this worker.
    """

    def __init__(self) -> None:
        self._until: dict[AttemptName, float] = {}

    def may_go(self, attempt: AttemptName, now: float) -> bool:
        """Whether this attempt may take room now: no other attempt has an earlier claim."""
        self._until = {one: until for one, until in self._until.items() if until > now}
        first = next(iter(self._until), attempt)
        return first == attempt

    def make(self, attempt: AttemptName, now: float) -> None:
        """Add or renew the claim of an attempt that has found no room. A renewed claim keeps its
        position."""
        self._until[attempt] = now + CLAIM_S

    def drop(self, attempt: AttemptName) -> None:
        """Remove the claim of an attempt that has found room; idempotent."""
        self._until.pop(attempt, None)


class Room:
    """Decides whether there is room for a ticket or a local prompt."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._claims = Claims()

    def check(
        self, count: int, pinned: list[int], spec: SequenceSpec, *, promised: int, now: float
    ) -> None:
        """Check that there is room for one more sequence, while ``promised`` places in the batch
        are reserved for others.

        The sequence needs the cached blocks ``pinned``, and ``count`` blocks in addition. Preempted
        sequences come first, in the order of their first checks. Raises NoRoom, and HandoffError if
        there can never be room.
        """
        self.check_ever(count + len(pinned))
        self.check_count(
            count + self._scheduler.pool.evictable(pinned), spec, promised=promised, now=now
        )
        self._claims.drop((spec.request_id, spec.attempt))

    def check_ever(self, count: int) -> None:
        """Check that the worker has ``count`` blocks in total, free or not. Raises HandoffError
        otherwise."""
        total = self._scheduler.pool.total
        if count > total:
            raise HandoffError(f"{count} blocks needed: this worker has only {total}")

    def check_count(self, count: int, spec: SequenceSpec, *, promised: int, now: float) -> None:
        """Check, without a cache lookup, that ``count`` blocks and the sequence's places in the
        batch are available.

        It reserves nothing. A preempted sequence that finds no room gets a claim, or its claim is
        renewed. Raises NoRoom.
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
        """Raise NoRoom unless the batch has places and the pool has blocks for one more request.

        A request with many choices need not have a place for all of them at once. Otherwise it
        would wait until the batch is empty. If its choices need more than a share of the places,
        they decode in turns.
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
