"""All tickets of a receiving worker, by id and by request, and the tombstones of early aborts.

Plain Python, owned by the event loop.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from baton.errors import TicketEnded
from kvtransfer.tickets.ticket import Attempt, Ticket

TOMBSTONE_S = 60.0
"""An abort that overtakes its reserve is remembered this long: longer than any retry of a call."""
MAX_TOMBSTONES = 10_000


class TicketBook:
    """Keeps tickets until they end."""

    def __init__(self) -> None:
        self._tickets: dict[str, Ticket] = {}
        self._of_attempt: dict[Attempt, str] = {}
        self._tombstones: OrderedDict[Attempt, float] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket]:
        return iter(list(self._tickets.values()))

    def add(self, ticket: Ticket) -> None:
        """Raises TicketEnded if its attempt was aborted before."""
        self.check_alive(ticket.attempt)
        self._tickets[ticket.ticket_id] = ticket
        self._of_attempt[ticket.attempt] = ticket.ticket_id

    def check_alive(self, attempt: Attempt) -> None:
        """Raises TicketEnded for an attempt with a tombstone."""
        if attempt in self._tombstones:
            raise TicketEnded(f"request {attempt[0]} was aborted before its blocks were reserved")

    def get(self, ticket_id: str) -> Ticket:
        """Raises TicketEnded for an unknown one: it has ended, or never was."""
        ticket = self._tickets.get(ticket_id)
        if ticket is None:
            raise TicketEnded(f"ticket {ticket_id} is unknown here")
        return ticket

    def find_id(self, ticket_id: str) -> Ticket | None:
        """A ticket, if it has not ended."""
        return self._tickets.get(ticket_id)

    def find(self, attempt: Attempt) -> Ticket | None:
        """The ticket of an attempt, if it has one."""
        ticket_id = self._of_attempt.get(attempt)
        return None if ticket_id is None else self._tickets.get(ticket_id)

    def bury(self, attempt: Attempt, now: float) -> None:
        """Remember that an attempt is over, so that a late reserve is refused."""
        self._tombstones[attempt] = now + TOMBSTONE_S
        self._tombstones.move_to_end(attempt)
        while len(self._tombstones) > MAX_TOMBSTONES:
            self._tombstones.popitem(last=False)

    def drop(self, ticket: Ticket) -> None:
        """Forget a ticket that has ended and whose blocks are no longer quarantined."""
        self._tickets.pop(ticket.ticket_id, None)
        self._of_attempt.pop(ticket.attempt, None)

    def expired(self, now: float) -> list[Ticket]:
        """Open tickets whose lease is over."""
        return [ticket for ticket in self._tickets.values() if ticket.has_expired(now)]

    def sweep(self, now: float) -> None:
        """Drop tombstones that have served their time."""
        while self._tombstones and next(iter(self._tombstones.values())) <= now:
            self._tombstones.popitem(last=False)
