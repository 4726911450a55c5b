"""Reserves at a decode worker: answered at once where there is room, else in their turn.

Owned by the control loop. The queue itself is ``decode_worker.reserve_queue``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from baton.errors import BatonError, Unavailable
from decode_worker.receiver import HandoffReceiver, Offer
from decode_worker.reserve_queue import ReserveQueue
from kvtransfer.tickets.ticket import Attempt, Ticket
from worker.role import Intake


class Reserves:
    """See the module's text."""

    def __init__(
        self, receiver: HandoffReceiver, intake: Intake, reserve: Callable[[Offer], Ticket]
    ) -> None:
        """``reserve`` promises blocks; it raises NoRoom where there is none."""
        self._receiver = receiver
        self._intake = intake
        self._reserve = reserve
        self._queue = ReserveQueue()
        self._serves_soon = False

    def __len__(self) -> int:
        """The number of waiting reserves."""
        return len(self._queue)

    @property
    def answered(self) -> int:
        """How many were answered in their turn."""
        return self._queue.answered

    def ask(self, offer: Offer) -> asyncio.Future[Ticket]:
        """Promise blocks as soon as there is room, and it is the offer's turn.

        A caller that cancels the future waits no more. Raises what ``reserve`` raises where the
        offer need not wait, NoRoom where the queue is full, and Unavailable while draining.
        """
        asked: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        if self._receiver.blocks.book.find(offer.attempt) is not None:
            # The reserve was answered before, and the answer was lost.
            asked.set_result(self._reserve(offer))
            return asked
        self._intake.check()
        self._receiver.check_offer(offer)
        offer.deadline = time.monotonic() + offer.spec.deadline_s
        self._queue.add(offer, asked)
        asked.add_done_callback(self._queue.leave)
        self._queue.serve(self._reserve)
        if asked.done():
            asked.result()
        return asked

    def serve_soon(self) -> None:
        """Serve waiting reserves: blocks or places may have come back."""
        if len(self._queue) and not self._serves_soon:
            self._serves_soon = True
            asyncio.get_running_loop().call_soon(self._serve)

    def _serve(self) -> None:
        self._serves_soon = False
        self._queue.serve(self._reserve)

    def heartbeat(self) -> None:
        """Check again: some blocks become free without a call, for example blocks that others read.

        All are refused at a worker that takes nothing more.
        """
        try:
            self._intake.check()
        except Unavailable as draining:
            self._queue.close(draining)
            return
        head = self._queue.head()
        if head is not None:
            head.min_blocks = 0
            self.serve_soon()

    def end(self, attempt: Attempt, error: BatonError) -> None:
        """See ``ReserveQueue.end``."""
        self._queue.end(attempt, error)

    def close(self, error: BatonError) -> None:
        """See ``ReserveQueue.close``."""
        self._queue.close(error)
