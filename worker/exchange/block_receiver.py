"""The receiving side of all transfers to this worker: reserves blocks, admits copies, ends tickets.

Owned by the event loop. The states are those of ``kvtransfer.tickets``; ``now`` is passed in.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from baton.errors import BatonError, ChecksumMismatch, HandoffError, TicketEnded
from baton.request import AttemptName, Geometry
from baton.telemetry.worker_metrics import WorkerMetrics
from engine.scheduling.block_pool import BlockPool
from kvtransfer.layout.layout import KvLayout
from kvtransfer.layout.shard_layout import ShardLayout, shards_to
from kvtransfer.pairs.push_fan import fail
from kvtransfer.tickets import Purpose, Ticket, TicketReceiver
from worker.exchange.rank_link import RankLinks

NO_TRANSPORT = "none"
"""Transport label in the metrics for a ticket that ended before any of its bytes arrived."""


OnReleased = Callable[[Ticket, BatonError], None]
"""Function that receives a ticket that ended before its commit, and the error that ended it."""


@dataclass(frozen=True, slots=True)
class _Opening:
    """A ticket that some of the worker's other ranks have not opened yet."""

    awaited: set[int]
    done: asyncio.Future[None]


class BlockReceiver(TicketReceiver):
    """The tickets of this worker: reserves blocks for writers, admits copies into them, and ends
    tickets.

    Implements ``kvtransfer.pairs.inbound_pair.TicketKeeper``.
    """

    def __init__(
        self,
        pool: BlockPool,
        metrics: WorkerMetrics,
        *,
        block_bytes: int,
        lease_s: float,
        worker: str = "",
        geometry: Geometry | None = None,
        ranks: RankLinks | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``lease_s``: seconds after which a ticket ends if its writer sends neither data nor
        heartbeats.

        ``block_bytes`` is the size of this rank's blocks. ``geometry`` is the worker's; it is
        needed if this worker or a writer has several ranks. ``ranks`` are the links to this
        worker's other ranks, if there are any. ``worker`` is the slot's name for metrics. ``clock``
        measures leases; see ``TicketReceiver``.
        """
        super().__init__(clock)
        self._listeners: dict[object, OnReleased] = {}
        self.pool = pool
        self._metrics = metrics
        self.block_bytes = block_bytes
        self._lease_s = lease_s
        self._worker = worker
        self._geometry = geometry
        self._ranks = ranks
        if ranks is not None:
            ranks.subscribe(self)
        self._opening: dict[str, _Opening] = {}
        self._completing: dict[str, asyncio.Future[None]] = {}
        """Futures on which callers wait until all bytes of a ticket have arrived, by ticket id."""

    def subscribe(self, on_released: OnReleased) -> Callable[[], None]:
        """Call ``on_released`` for each ticket that ends before its commit.

        Returns a function that ends the subscription; it is idempotent.
        """
        subscription = object()
        self._listeners[subscription] = on_released

        def unsubscribe() -> None:
            self._listeners.pop(subscription, None)

        return unsubscribe

    def promise(
        self,
        attempt: AttemptName,
        writer: str,
        *,
        missing: int,
        pinned: list[int],
        now: float,
        purpose: Purpose = Purpose.HANDOFF,
        geometry: Geometry | None = None,
    ) -> Ticket:
        """Make a ticket for a writer: allocate ``missing`` blocks, and pin the cached blocks
        ``pinned``.

        ``geometry`` is the writer's; None means that of this worker. If this worker has several
        ranks, the writer must wait for the future of ``opened``. Raises TicketEnded after an abort,
        ``OutOfBlocks``, and WorkerFailed if a rank is gone. If it raises, no block is allocated or
        pinned.
        """
        self.book.check_alive(attempt)
        if self._ranks is not None:
            self._ranks.check()
        writers = geometry or self._geometry
        self.pool.pin(pinned)
        try:
            blocks = self.pool.allocate(missing)
        except BaseException:
            self.pool.release(pinned)
            raise
        ticket = Ticket(
            secrets.token_hex(8),
            attempt,
            writer,
            missing=blocks,
            pinned=pinned,
            block_bytes=self.block_bytes,
            lease_s=self._lease_s,
            now=now,
            purpose=purpose,
            shards=self._shards(writers),
            others=self._ranks.numbers if self._ranks is not None and missing else (),
        )
        self.book.add(ticket)
        if self._ranks is not None and missing:
            assert writers is not None, "a worker of several ranks has a geometry"
            done = asyncio.get_running_loop().create_future()
            self._opening[ticket.ticket_id] = _Opening(set(self._ranks.numbers), done)
            self._ranks.open_ticket(ticket, writers)
        return ticket

    def _shards(self, writer: Geometry | None) -> Sequence[ShardLayout]:
        """Return the layouts of the parts that this rank gets from each rank of a writer. Empty if
        both workers have one rank."""
        own = self._geometry
        if own is None or writer is None or own.tensor_parallel == writer.tensor_parallel == 1:
            return ()
        return shards_to(KvLayout.of(writer), KvLayout.of(own), 0)

    def opened(self, ticket_id: str) -> asyncio.Future[None] | None:
        """Return a future that is done once all ranks of this worker accept the writer's data for a
        ticket. The future fails if the ticket ends.

        Returns None if all ranks accept the data already.
        """
        opening = self._opening.get(ticket_id)
        return None if opening is None else opening.done

    def whole(self, ticket_id: str) -> asyncio.Future[None] | None:
        """Return a future that is done once every byte of a ticket has arrived on all ranks. The
        future fails if the ticket ends.

        Returns None if all bytes have arrived already. Raises TicketEnded for a ticket that is
        unknown or has ended. Callers that may be cancelled must shield the future, because other
        callers may wait for it.
        """
        ticket = self.book.get(ticket_id)
        if ticket.is_complete:
            return None
        if not ticket.is_open:
            raise TicketEnded(f"ticket {ticket_id} has ended")
        whole = self._completing.get(ticket_id)
        if whole is None:
            whole = self._completing[ticket_id] = asyncio.get_running_loop().create_future()
        return whole

    # Copies

    def end_copy(self, ticket_id: str, transport: str, copied: int) -> None:
        """Record that ``copied`` bytes of a ticket are verified and stored in its blocks."""
        ticket = self._end_copy(ticket_id)
        self._count_bytes(ticket, transport, copied)
        self._check_complete(ticket)

    def _count_bytes(self, ticket: Ticket, transport: str, count: int) -> None:
        self._metrics.handoff_bytes.labels(transport=transport).inc(count)
        writer = ticket.writer.partition(":")[0]
        self._metrics.received_bytes.labels(self._worker, writer, transport).inc(count)

    def _check_complete(self, ticket: Ticket) -> None:
        if ticket.is_open and ticket.is_complete:
            whole = self._completing.pop(ticket.ticket_id, None)
            if whole is not None and not whole.done():
                whole.set_result(None)

    def fail_copy(self, ticket_id: str, error: BatonError, now: float) -> None:
        """End a ticket because bytes of a copy into its blocks were damaged or did not arrive."""
        outcome = "checksum" if isinstance(error, ChecksumMismatch) else "error"
        ticket = self.book.get(ticket_id)
        if ticket.is_open:
            self.book.bury(ticket.attempt, now)
        self._release(ticket, outcome, error)
        self._end_copy(ticket_id)

    def drop_copy(self, ticket_id: str) -> None:
        """Record that an admitted copy did not begin, because its ticket has ended."""
        self._end_copy(ticket_id)

    def _end_copy(self, ticket_id: str) -> Ticket:
        ticket = self.book.get(ticket_id)
        was_quarantined = ticket.is_quarantined
        ticket.end_copy()
        self._check_quarantine(ticket, was_quarantined=was_quarantined)
        return ticket

    def _check_quarantine(self, ticket: Ticket, *, was_quarantined: bool) -> None:
        if was_quarantined and not ticket.is_quarantined:
            self.pool.end_quarantine(ticket.missing)
            self.book.drop(ticket)

    # Reports of this worker's other ranks

    def rank_opened(self, ticket_id: str, rank: int) -> None:
        """Record that rank ``rank`` has opened a ticket, so that writers may send to it."""
        opening = self._opening.get(ticket_id)
        if opening is None:
            return
        opening.awaited.discard(rank)
        if not opening.awaited:
            del self._opening[ticket_id]
            if not opening.done.done():
                opening.done.set_result(None)

    def rank_filled(self, ticket_id: str, rank: int, transport: str, count: int) -> None:
        """Record that rank ``rank`` has stored and verified all its bytes of a ticket. ``count`` is
        the number of these bytes."""
        ticket = self.book.find_id(ticket_id)
        if ticket is not None:
            self._count_bytes(ticket, transport, count)
            ticket.rank_filled(rank, count)
            self._check_complete(ticket)

    def rank_failed(self, ticket_id: str, error: BatonError) -> None:
        """End a ticket, because bytes for another rank were damaged or cannot arrive."""
        ticket = self.book.find_id(ticket_id)
        if ticket is not None and ticket.is_open:
            self.book.bury(ticket.attempt, self.clock())
            outcome = "checksum" if isinstance(error, ChecksumMismatch) else "error"
            self._release(ticket, outcome, error)

    def rank_freed(self, ticket_id: str, rank: int) -> None:
        """Record that on rank ``rank``, no copy into a ticket's blocks is running any more."""
        ticket = self.book.find_id(ticket_id)
        if ticket is not None:
            was_quarantined = ticket.is_quarantined
            ticket.rank_freed(rank)
            self._check_quarantine(ticket, was_quarantined=was_quarantined)

    def rank_gone(self, error: BatonError) -> None:
        """End every ticket, because another rank of this worker can no longer be reached.

        The blocks stay quarantined, since copies may still run on that rank. Without that rank, the
        worker ends.
        """
        for ticket in self.book:
            self._release(ticket, "error", error)

    # Ends of tickets

    def shorten(self, ticket_id: str, count: int) -> None:
        """Keep only the first ``count`` missing blocks of a ticket, because the writer has no more
        blocks to send; see ``Ticket.shorten``."""
        dropped = self.book.get(ticket_id).shorten(count)
        if dropped and self._ranks is not None:
            self._ranks.shorten_ticket(ticket_id, count)
        self.pool.release(dropped)

    def commit(self, ticket_id: str, writer: str, now: float) -> Ticket:
        """End a ticket successfully. The caller owns the ticket's blocks from now on: the pinned
        blocks, followed by the missing ones.

        Raises TicketEnded, and HandoffError if bytes are missing.
        """
        ticket = self.book.get(ticket_id)
        ticket.commit(writer)
        self.book.drop(ticket)
        if self._ranks is not None and ticket.missing:
            self._ranks.close_ticket(ticket_id)
        # An attempt gets only one ticket: a late reserve gets none.
        self.book.bury(ticket.attempt, now)
        transport = self._count(ticket, "ok")
        if ticket.purpose is Purpose.HANDOFF:
            seconds = now - ticket.reserved_at
            self._metrics.handoff_seconds.labels(transport=transport).observe(seconds)
        else:
            self._metrics.pulled_blocks.labels(transport=transport).inc(len(ticket.missing))
        return ticket

    @contextmanager
    def holding(self, ticket_id: str, writer: str) -> Iterator[None]:
        """Keep a ticket from expiring within this context, while its commit waits for this worker:
        see ``Ticket.hold``.

        Raises TicketEnded if no ticket with this id is open for ``writer``.
        """
        ticket = self.book.get(ticket_id)
        ticket.hold(writer)
        try:
            yield
        finally:
            ticket.let_go(self.clock())

    def abort(self, attempt: AttemptName, now: float, outcome: str = "aborted") -> None:
        """End an attempt's ticket, if it has one. Later calls of ``promise`` for this attempt raise
        TicketEnded. Idempotent.

        ``outcome`` is the label for the metrics.
        """
        self.book.bury(attempt, now)
        ticket = self.book.find(attempt)
        if ticket is not None:
            self._release(ticket, outcome, TicketEnded("its writer or its request has ended"))

    def writer_gone(self, writer: str, now: float) -> None:
        """End the tickets of a writer whose stream failed, because bytes that were not sent can no
        longer arrive."""
        error = HandoffError(f"the connection to {writer} failed before all blocks had arrived")
        for ticket in self.book:
            if ticket.writer == writer and ticket.is_open and not ticket.is_complete:
                self.book.bury(ticket.attempt, now)
                self._release(ticket, "error", error)

    def sweep(self, now: float) -> None:
        """End the tickets whose lease has expired, and drop expired tombstones."""
        for ticket in self.book.expired(now):
            self.book.bury(ticket.attempt, now)
            error = HandoffError(f"{ticket.writer} was silent for {self._lease_s} s")
            self._release(ticket, "expired", error)
        self.book.sweep(now)

    def close(self) -> None:
        """End every ticket."""
        for ticket in self.book:
            self._release(ticket, "aborted", TicketEnded("this worker is stopping"))

    def _release(self, ticket: Ticket, outcome: str, error: BatonError) -> None:
        if not ticket.release():
            return
        if self._ranks is not None and ticket.missing:
            self._ranks.close_ticket(ticket.ticket_id)
        opening = self._opening.pop(ticket.ticket_id, None)
        if opening is not None:
            fail(opening.done, error)
        whole = self._completing.pop(ticket.ticket_id, None)
        if whole is not None:
            fail(whole, error)
        self.pool.release(ticket.pinned)
        if ticket.is_quarantined:
            self.pool.quarantine(ticket.missing)
        else:
            self.pool.release(ticket.missing)
            self.book.drop(ticket)
        self._count(ticket, outcome)
        for on_released in list(self._listeners.values()):
            on_released(ticket, error)

    def _count(self, ticket: Ticket, outcome: str) -> str:
        transport = self._transports.pop(ticket.ticket_id, NO_TRANSPORT)
        is_pull = ticket.purpose is Purpose.PULL
        counter = self._metrics.pulls if is_pull else self._metrics.handoffs
        counter.labels(transport=transport, outcome=outcome).inc()
        return transport
