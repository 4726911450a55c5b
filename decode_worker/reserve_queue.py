"""Reserves that wait for room at a decode worker, in the order in which they are served.

    waiting ─at the head of the queue, and there is room→ served
    waiting ─its caller leaves, its attempt ends, the worker takes nothing more→ gone

Sequences that have lost their blocks before come first. Only the head of the queue is checked. So a
queue of any length costs no more than one entry, and small prompts cannot always overtake a large
one. Owned by the worker's event loop.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from baton.errors import BatonError, NoRoom
from decode_worker.receiver import Offer
from kvtransfer.tickets.ticket import Attempt, Ticket

MAX_WAITING = 256
"""Reserves in the queue; each keeps a prompt in memory."""
FULL_RETRY_S = 1.0
"""Seconds after which a writer that finds the queue full may ask again."""


@dataclass(frozen=True, slots=True)
class _Waiting:
    offer: Offer
    answer: asyncio.Future[Ticket]
    """Done: the caller has left, or the offer was answered out of its turn."""


class ReserveQueue:
    """Offers that are answered at once where there is room, else in their turn."""

    def __init__(self, reserve: Callable[[Offer], Ticket], max_waiting: int = MAX_WAITING) -> None:
        """``reserve`` promises blocks; it raises NoRoom where there is none."""
        self._reserve = reserve
        self._max_waiting = max_waiting
        self._preempted: deque[_Waiting] = deque()
        self._others: deque[_Waiting] = deque()
        self._serves_soon = False
        self.answered = 0
        """Reserves that were answered in their turn; read only."""

    def __len__(self) -> int:
        """The number of waiting reserves."""
        return len(self._preempted) + len(self._others)

    def add(self, offer: Offer) -> asyncio.Future[Ticket]:
        """Promise blocks as soon as there is room, and it is the offer's turn.

        A caller that cancels the future waits no more. Raises what ``reserve`` raises where the
        offer need not wait, and NoRoom where the queue is full.
        """
        if len(self) >= self._max_waiting:
            raise NoRoom(f"{self._max_waiting} others wait for room here", retry_after=FULL_RETRY_S)
        answer: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        queue = self._preempted if offer.spec.preemptions else self._others
        queue.append(_Waiting(offer, answer))
        answer.add_done_callback(lambda _: self._keep(lambda waiting: waiting.answer is not answer))
        self.serve()
        if answer.done():
            answer.result()
        return answer

    def serve(self) -> None:
        """Answer as many as there is room for."""
        self._serves_soon = False
        while queue := self._preempted or self._others:
            waiting = queue[0]
            if not waiting.answer.done():
                try:
                    waiting.answer.set_result(self._reserve(waiting.offer))
                except NoRoom:
                    return
                except Exception as error:
                    waiting.answer.set_exception(error)
                self.answered += 1
            queue.popleft()

    def serve_soon(self) -> None:
        """Serve waiting reserves: blocks or places may have come back."""
        if len(self) and not self._serves_soon:
            self._serves_soon = True
            asyncio.get_running_loop().call_soon(self.serve)

    def check_again(self) -> None:
        """Serve even where counts show no room: blocks that others read come back unnoticed."""
        queue = self._preempted or self._others
        if queue:
            queue[0].offer.min_blocks = 0
            self.serve_soon()

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
