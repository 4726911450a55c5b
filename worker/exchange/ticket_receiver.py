"""The part of receiving that rank 0 and the other ranks share: tickets and their writers.

Only a ticket's own writer brings bytes and renews it. Owned by the event loop; ``now`` is passed
in, as ``clock`` has it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from baton.errors import TicketEnded
from kvtransfer.tickets.ticket_book import TicketBook


class TicketReceiver:
    """The shared part of ``kvtransfer.pairs.inbound.TicketKeeper``."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """``clock`` is that of leases, in seconds; see ``baton.liveness.listening``."""
        self.clock = clock
        self.book = TicketBook()
        self._transports: dict[str, str] = {}
        """By what the bytes of a ticket came last."""

    def begin_copy(
        self,
        ticket_id: str,
        writer: str,
        transport: str,
        targets: Sequence[int],
        offset: int,
        length: int,
        now: float,
        rank: int = 0,
    ) -> tuple[int, ...] | None:
        """See ``Ticket.begin_copy``. TicketEnded too for a ticket of another writer."""
        ticket = self.book.get(ticket_id)
        if ticket.writer != writer:
            raise TicketEnded(f"ticket {ticket_id} is not open for {writer}")
        blocks = ticket.begin_copy(targets, offset, length, now, rank)
        self._transports[ticket_id] = transport
        return blocks

    def renew(self, writer: str, ticket_ids: Sequence[str], now: float) -> list[str]:
        """A writer's heartbeat. Returns the tickets that it must no longer write to."""
        ended = []
        for ticket_id in ticket_ids:
            ticket = self.book.find_id(ticket_id)
            if ticket is not None and ticket.is_open and ticket.writer == writer:
                ticket.renew(now)
            else:
                ended.append(ticket_id)
        return ended
