"""Writers that wait for room at a decode worker, in the order in which they are served.

    waiting ─first in line, and there is room→ served
    waiting ─its caller leaves, its attempt ends, the worker takes nothing more→ gone

Sequences that have lost their blocks before come first. Only the head of the line is looked at, so
that a line of any length costs no more than one who waits, and a large prompt is not overtaken by
small ones for ever. Plain Python, owned by the control loop.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from baton.errors import BatonError, NoRoom
from decode_worker.receiver import Offer
from kvtransfer.ticket import Attempt, Ticket

MOST_WAITING = 256
"""Each of them keeps a prompt in memory."""
FULL_RETRY_S = 1.0
"""When a writer may come back that finds the line full."""


class Answer(Protocol):
    """As a future's. One that is done is not waited for any more."""

    def done(self) -> bool: ...

    def set_result(self, result: Ticket, /) -> None: ...

    def set_exception(self, exception: Exception, /) -> None: ...


@dataclass(frozen=True, slots=True)
class _Waiting:
    offer: Offer
    answer: Answer


class ReserveQueue:
    """See the module's text."""

    def __init__(self, most: int = MOST_WAITING) -> None:
        self._most = most
        self._preempted: deque[_Waiting] = deque()
        self._others: deque[_Waiting] = deque()

    def __len__(self) -> int:
        return len(self._preempted) + len(self._others)

    def add(self, offer: Offer, answer: Answer) -> None:
        """Raises NoRoom where too many wait."""
        if len(self) >= self._most:
            raise NoRoom(f"{self._most} others wait for room here", retry_after=FULL_RETRY_S)
        line = self._preempted if offer.spec.preemptions else self._others
        line.append(_Waiting(offer, answer))

    def serve(self, reserve: Callable[[Offer], Ticket]) -> None:
        """Answer those for whom there is room. ``reserve`` raises NoRoom where there is none."""
        while line := self._preempted or self._others:
            waiting = line[0]
            if not waiting.answer.done():
                try:
                    waiting.answer.set_result(reserve(waiting.offer))
                except NoRoom:
                    return
                except Exception as error:
                    waiting.answer.set_exception(error)
            line.popleft()

    def head(self) -> Offer | None:
        """The offer that is served next."""
        line = self._preempted or self._others
        return line[0].offer if line else None

    def leave(self, answer: Answer) -> None:
        """Its caller waits no more; idempotent."""
        self._keep(lambda waiting: waiting.answer is not answer)

    def end(self, attempt: Attempt, error: BatonError) -> None:
        """An attempt is over: its reserve is answered with an error, if it waits."""
        self._refuse(error, lambda offer: offer.attempt == attempt)

    def close(self, error: BatonError) -> None:
        """Nothing more is taken: all are answered with an error."""
        self._refuse(error, lambda offer: True)

    def _refuse(self, error: BatonError, concerns: Callable[[Offer], bool]) -> None:
        for waiting in (*self._preempted, *self._others):
            if concerns(waiting.offer) and not waiting.answer.done():
                waiting.answer.set_exception(error)
        self._keep(lambda waiting: not concerns(waiting.offer))

    def _keep(self, is_kept: Callable[[_Waiting], bool]) -> None:
        self._preempted = deque(filter(is_kept, self._preempted))
        self._others = deque(filter(is_kept, self._others))
