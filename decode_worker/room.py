"""Whether a decode worker has room for one more sequence.

Tickets and local prompts follow the same rule. A request without room is refused at once, and
``decode_worker.room_turns`` keeps its place in the order. Plain Python; ``now`` is in seconds of
any one clock. Owned by the event loop.
"""

from __future__ import annotations

from collections.abc import Callable

from baton.errors import HandoffError, NoRoom
from decode_worker.room_turns import NOTHING, Asker, Grant, Need, RoomTurns
from engine.scheduling.scheduler import Scheduler

_SHARE_OF_PLACES = 0.25
"""Maximum share of the batch's places that must be free before a request with many choices is
admitted."""


class Room:
    """Decides whether there is room for a ticket or a local prompt."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self.turns = RoomTurns()
        """The requests that were refused here, and wait for room."""

    def check_ever(self, count: int) -> None:
        """Check that the worker has ``count`` blocks in total, free or not. Raises HandoffError
        otherwise."""
        total = self._scheduler.pool.total
        if count > total:
            raise HandoffError(f"{count} blocks needed: this worker has only {total}")

    def check(self, asker: Asker, count: int, *, promised: int) -> None:
        """Check that there is room for one more request, while ``promised`` places in the batch are
        reserved for others.

        ``count``: number of available blocks that the request takes. It may be a lower bound, which
        needs no look at the prompt. Reserves nothing. Raises NoRoom, and then the request waits for
        its turn. Requests that wait longer come first, and so do preempted ones.
        """
        need = Need(self._places(asker.choices), count)
        try:
            self._check(asker, need, promised)
        except NoRoom:
            self.turns.wait(asker, need)
            raise

    def take(self, asker: Asker, count: int, *, promised: int) -> None:
        """Check the room as ``check`` does, for a request that now takes it."""
        self.check(asker, count, promised=promised)
        self.turns.taken(asker)

    def grant(
        self, *, promised: int, now: float, is_there: Callable[[str], bool] = lambda _: True
    ) -> list[Grant]:
        """Grant free room to the requests whose turn it is: see ``RoomTurns.grant``."""
        if not self.turns:
            return []
        return self.turns.grant(self._free(promised), now, is_there)

    def _free(self, promised: int) -> Need:
        """Return the places and blocks that no sequence has or needs soon."""
        scheduler = self._scheduler
        if scheduler.has_preempted:
            return NOTHING
        sequences = len(scheduler.running) + len(scheduler.waiting)
        places = scheduler.limits.max_sequences - sequences - promised
        # One more block for each sequence, so that a new one does not preempt the running ones.
        return Need(places, scheduler.pool.available - sequences)

    def _places(self, choices: int) -> int:
        """Return the number of places that must be free for a request.

        A request with many choices need not have a place for all of them at once. Otherwise it
        would wait until the batch is empty. If its choices need more than a share of the places,
        they decode in turns."""
        most = self._scheduler.limits.max_sequences
        return min(choices, max(1, int(most * _SHARE_OF_PLACES)))

    def _check(self, asker: Asker, need: Need, promised: int) -> None:
        if self._scheduler.has_preempted:
            raise NoRoom("preempted sequences come first")
        if self.turns.must_wait(asker):
            raise NoRoom("other requests have waited longer for room")
        free = self._free(promised) - self.turns.held(asker)
        if need.places > free.places:
            raise NoRoom("all places of the batch are taken")
        if need.blocks > free.blocks:
            raise NoRoom(f"{need.blocks} blocks needed, {max(0, free.blocks)} available")
