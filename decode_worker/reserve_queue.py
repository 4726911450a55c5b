"""Reserves that wait for room at a decode worker, in the order in which they are served.

    waiting ─at the head of the queue, and there is room→ served
    waiting ─its caller leaves, its attempt ends, the worker takes nothing more→ gone

Sequences that have lost their blocks before come first. Only the head of the queue is looked at. So
a queue of any length costs no more than one entry, and small prompts cannot always overtake a large
one. Plain Python, owned by the control loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError, NoRoom
from decode_worker.receiver import Offer
from kvtransfer.tickets.ticket import Attempt, Ticket

MAX_WAITING = 256
"""Reserves in the queue; each keeps a prompt in memory."""
FULL_RETRY_S = 1.0
"""Seconds after which a writer that finds the queue full may ask again."""


class Answer(Protocol):
    """The part of a future that is used here. One that is done needs no answer any more."""

    def done(self) -> bool: ...

    def set_result(self, result: Ticket, /) -> None: ...

    def set_exception(self, exception: Exception, /) -> None: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    offer: Offer
    answer: Answer


class ReserveQueue:
    """See the module's text."""

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self._max_waiting = max_waiting
        self._preempted: deque[_Waiting] = deque()
        self._others: deque[_Waiting] = deque()
        self.answered = 0
        """Reserves that were answered in their turn; read only."""

    def __len__(self) -> int:
        return len(self._preempted) + len(self._others)

    def add(self, offer: Offer, answer: Answer) -> None:
        """Queue an offer. Raises NoRoom where the queue is full."""
        if len(self) >= self._max_waiting:
            raise NoRoom(f"{self._max_waiting} others wait for room here", retry_after=FULL_RETRY_S)
        queue = self._preempted if offer.spec.preemptions else self._others
        queue.append(_Waiting(offer, answer))

    def serve(self, reserve: Callable[[Offer], Ticket]) -> None:
        """Answer as many as there is room for. ``reserve`` raises NoRoom where there is none."""
        while queue := self._preempted or self._others:
            waiting = queue[0]
            if not waiting.answer.done():
                try:
                    waiting.answer.set_result(reserve(waiting.offer))
                except NoRoom:
                    return
                except Exception as error:
                    waiting.answer.set_exception(error)
                self.answered += 1
            queue.popleft()

    def head(self) -> Offer | None:
        """The offer that is served next; None where the queue is empty."""
        queue = self._preempted or self._others
        return queue[0].offer if queue else None

    def leave(self, answer: Answer) -> None:
        """Remove the entry whose caller waits no more; idempotent."""
        self._keep(lambda waiting: waiting.answer is not answer)

    def end(self, attempt: Attempt, error: BatonError) -> None:
        """Answer the reserve of an attempt that is over with an error, if it waits."""
        self._refuse(error, lambda offer: offer.attempt == attempt)

    def close(self, error: BatonError) -> None:
        """Answer all with an error: the worker takes nothing more."""
        self._refuse(error, lambda offer: True)

    def _refuse(self, error: BatonError, concerns: Callable[[Offer], bool]) -> None:
        for waiting in (*self._preempted, *self._others):
            if concerns(waiting.offer) and not waiting.answer.done():
                waiting.answer.set_exception(error)
        self._keep(lambda waiting: not concerns(waiting.offer))

    def _keep(self, is_kept: Callable[[_Waiting], bool]) -> None:
        self._preempted = deque(filter(is_kept, self._preempted))
        self._others = deque(filter(is_kept, self._others))
