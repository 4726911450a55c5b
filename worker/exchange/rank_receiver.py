"""The receiver of a rank other than rank 0: its parts of tickets that rank 0 has issued.

    open ─all bytes of the writer's blocks are verified→ filled ─rank 0 closes it→ gone
    open ─damaged bytes, expiry, its writer is lost→ failed ─rank 0 closes it→ gone
    open, failed ─rank 0 closes it, the last copy ended→ freed, gone

The rank reports each of these to rank 0, which owns the blocks. Owned by the rank's event loop;
``now`` is passed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from baton.errors import BatonError, HandoffError, TicketEnded
from baton.rpc import convert
from baton.v1 import rank_pb2
from kvtransfer.layout.layout import KvLayout
from kvtransfer.layout.shard_layout import shards_to
from kvtransfer.pairs.pair import Identity
from kvtransfer.tickets import Ticket, TicketReceiver

Event = rank_pb2.RankEvent


class RankReceiver(TicketReceiver):
    """Holds the tickets of a rank other than rank 0. Implements
    ``kvtransfer.pairs.inbound_pair.TicketKeeper``."""

    def __init__(
        self,
        identity: Identity,
        tell: Callable[[Event], None],
        released: Callable[[Ticket, BatonError], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``tell`` sends events to rank 0. ``released`` receives every ticket that ended before all
        its bytes arrived.

        ``clock`` measures leases; see ``TicketReceiver``.
        """
        super().__init__(clock)
        self._identity = identity
        self._tell = tell
        self._released = released
        self._closed: set[str] = set()
        """Ids of closed tickets into whose blocks a copy still runs."""

    def open(self, message: rank_pb2.OpenTicket, now: float) -> None:
        """Open a ticket that rank 0 has issued, and accept data from the ticket's writer."""
        source = KvLayout.of(convert.geometry_from_proto(message.geometry))
        target = KvLayout.of(self._identity.geometry)
        ticket = Ticket(
            message.ticket_id,
            (message.ticket_id, 0),
            message.writer,
            missing=list(message.missing),
            pinned=[],
            block_bytes=target.of_rank(self._identity.rank).block_bytes,
            lease_s=message.lease_ms / 1000,
            now=now,
            shards=shards_to(source, target, self._identity.rank),
        )
        self.book.add(ticket)
        self._tell(Event(ticket_opened=rank_pb2.TicketOpened(ticket_id=ticket.ticket_id)))

    def close(self, ticket_id: str) -> None:
        """Accept no more data for a ticket. Report to rank 0 when no copy into the ticket's blocks
        is running any more."""
        try:
            ticket = self.book.get(ticket_id)
        except TicketEnded:
            return
        self._closed.add(ticket_id)
        if ticket.release():
            self._released(ticket, TicketEnded(f"ticket {ticket_id} was closed"))
        self._drop_ended(ticket)

    def shorten(self, ticket_id: str, blocks: int) -> None:
        """Expect data for only the first ``blocks`` of a ticket's missing blocks.

        The ticket fails if copies are running, since they might write to the other blocks.
        """
        try:
            ticket = self.book.get(ticket_id)
            ticket.shorten(blocks)
        except TicketEnded:
            return  # rank 0 has the report already
        except HandoffError as error:
            self._fail(ticket, error)
            return
        self._check_filled(ticket)

    def close_all(self) -> None:
        """Close all tickets, because rank 0 is gone."""
        for ticket in self.book:
            self.close(ticket.ticket_id)

    def _drop_ended(self, ticket: Ticket) -> None:
        if ticket.ticket_id in self._closed and not ticket.copies:
            self._closed.discard(ticket.ticket_id)
            self._transports.pop(ticket.ticket_id, None)
            self.book.drop(ticket)
            self._tell(Event(ticket_freed=rank_pb2.TicketFreed(ticket_id=ticket.ticket_id)))

    # Reports of pairs

    def end_copy(self, ticket_id: str, transport: str, copied: int) -> None:
        """Record that ``copied`` bytes of a ticket are verified and stored in its blocks."""
        ticket = self.book.get(ticket_id)
        ticket.end_copy()
        self._check_filled(ticket)
        self._drop_ended(ticket)

    def _check_filled(self, ticket: Ticket) -> None:
        if ticket.is_open and ticket.is_complete:
            filled = rank_pb2.TicketFilled(
                ticket_id=ticket.ticket_id,
                bytes=ticket.expected_bytes,
                transport=self._transports.get(ticket.ticket_id, ""),
            )
            self._tell(Event(ticket_filled=filled))

    def fail_copy(self, ticket_id: str, error: BatonError, now: float) -> None:
        """End a ticket because bytes of a copy into its blocks were damaged or did not arrive."""
        ticket = self.book.get(ticket_id)
        ticket.end_copy()
        self._fail(ticket, error)
        self._drop_ended(ticket)

    def drop_copy(self, ticket_id: str) -> None:
        """Record that an admitted copy did not begin, because its ticket has ended."""
        ticket = self.book.get(ticket_id)
        ticket.end_copy()
        self._drop_ended(ticket)

    def writer_gone(self, writer: str, now: float) -> None:
        """Fail the tickets of a writer whose stream failed, because bytes that were not sent can no
        longer arrive."""
        error = HandoffError(f"the connection to {writer} failed before all blocks had arrived")
        for ticket in self.book:
            if ticket.writer == writer and not ticket.is_complete:
                self._fail(ticket, error)

    def sweep(self, now: float) -> None:
        """Fail the tickets whose lease has expired. Complete tickets do not expire: rank 0 ends
        them."""
        for ticket in self.book.expired(now):
            if not ticket.is_complete:
                silent = f"{ticket.writer} was silent for {ticket.lease_s} s"
                self._fail(ticket, HandoffError(f"{self._identity.name}: {silent}"))

    def _fail(self, ticket: Ticket, error: BatonError) -> None:
        if not ticket.release():
            return
        self._released(ticket, error)
        failed = rank_pb2.TicketFailed(
            ticket_id=ticket.ticket_id, error=error.message, code=error.code or ""
        )
        self._tell(Event(ticket_failed=failed))
