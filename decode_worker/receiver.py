"""The receiving end of handoffs: reserves blocks, takes segments in, commits or releases.

The states are those of ``kvtransfer.ticket``. Owned by the control loop; ``now`` is passed in.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass

from baton.errors import (
    ChecksumMismatch,
    ContextLengthExceeded,
    FingerprintMismatch,
    GeometryMismatch,
    HandoffError,
    NoRoom,
    TicketEnded,
)
from baton.hashing import block_hashes, hash_key
from baton.metrics import WorkerMetrics
from baton.request import Geometry, SequenceSpec
from engine.block_pool import BlockPool
from engine.scheduler import Scheduler
from kvtransfer import grpc_transport
from kvtransfer.ticket import Ticket
from kvtransfer.ticket_book import TicketBook

RETRY_AFTER_S = 0.05
"""How soon a writer that found no room may ask again: about one decode step."""


@dataclass(frozen=True, slots=True)
class Offer:
    """What a writer says of itself and of the sequence that it wants to hand over."""

    fingerprint: str
    geometry: Geometry
    incarnation: str
    writer: str
    spec: SequenceSpec


@dataclass(frozen=True, slots=True)
class Receipt:
    """A committed ticket: the sequence's blocks in order."""

    spec: SequenceSpec
    blocks: list[int]
    bytes: int


class HandoffReceiver:
    """Implements ``kvtransfer.grpc_transport.SegmentSink``."""

    def __init__(
        self,
        scheduler: Scheduler,
        metrics: WorkerMetrics,
        *,
        fingerprint: str,
        geometry: Geometry,
        incarnation: str,
        block_bytes: int,
        lease_s: float,
    ) -> None:
        self.book = TicketBook()
        self._scheduler = scheduler
        self._pool: BlockPool = scheduler.pool
        self._metrics = metrics
        self._fingerprint = fingerprint
        self._geometry = geometry
        self._incarnation = incarnation
        self._block_bytes = block_bytes
        self._lease_s = lease_s
        self._specs: dict[str, SequenceSpec] = {}

    def reserve(self, offer: Offer, now: float) -> Ticket:
        """Promise blocks. Raises HandoffError, NoRoom or ContextLengthExceeded."""
        self._check_offer(offer)
        spec = offer.spec
        attempt = (spec.request_id, spec.attempt)
        self.book.check_alive(attempt)
        known = self.book.find(attempt)
        if known is not None:
            if known.writer == offer.writer and known.is_open:
                known.renew(now)
                return known
            raise TicketEnded(f"request {spec.request_id} attempt {spec.attempt} has a ticket")
        size = self._scheduler.limits.block_size
        hashes = block_hashes(spec.token_ids, size, hash_key(self._fingerprint, spec.cache_salt))
        pinned = self._pool.match(hashes)
        count = -(-len(spec.token_ids) // size) - len(pinned)
        self._check_room(count, pinned)
        self._pool.pin(pinned)
        ticket = Ticket(
            secrets.token_hex(8),
            attempt,
            offer.writer,
            missing=self._pool.allocate(count),
            pinned=pinned,
            block_bytes=self._block_bytes,
            lease_s=self._lease_s,
            now=now,
        )
        self.book.add(ticket)
        self._specs[ticket.ticket_id] = spec
        return ticket

    def _check_offer(self, offer: Offer) -> None:
        if offer.fingerprint != self._fingerprint:
            raise FingerprintMismatch(
                f"{offer.writer} serves {offer.fingerprint}, "
                f"{self._incarnation} serves {self._fingerprint}"
            )
        if offer.geometry != self._geometry:
            raise GeometryMismatch(
                f"{offer.writer} has {offer.geometry}, {self._incarnation} has {self._geometry}"
            )
        if offer.incarnation != self._incarnation:
            raise HandoffError(f"{offer.incarnation} is gone; here is {self._incarnation}")
        spec = offer.spec
        # The first token comes along; what is left must be more than nothing, or it never ends.
        if len(spec.token_ids) + 1 >= self._scheduler.limits.context_length:
            raise ContextLengthExceeded(
                f"{len(spec.token_ids)} tokens leave no room to generate: "
                f"this worker's context is {self._scheduler.limits.context_length} tokens"
            )
        if len(spec.token_ids) + 1 - spec.prompt_length >= spec.sampling.max_tokens:
            raise HandoffError("the first token is the last: nothing is left to generate here")

    def _check_room(self, count: int, pinned: list[int]) -> None:
        scheduler = self._scheduler
        sequences = len(scheduler.running) + len(scheduler.waiting)
        if sequences + len(self.book) >= scheduler.limits.max_sequences:
            raise NoRoom("every sequence's place is taken", retry_after=RETRY_AFTER_S)
        if scheduler.has_preempted:
            raise NoRoom("preempted sequences come first", retry_after=RETRY_AFTER_S)
        # One block more for each sequence, so that a new one does not preempt the running ones.
        available = self._pool.available - self._pool.evictable(pinned)
        if count + sequences > available:
            raise NoRoom(f"{count} blocks wanted, {available} available", retry_after=RETRY_AFTER_S)

    # Segments

    def begin_copy(
        self, ticket_id: str, block_index: int, offset: int, length: int, now: float
    ) -> int | None:
        """See ``Ticket.begin_copy``."""
        return self.book.get(ticket_id).begin_copy(block_index, offset, length, now)

    def end_copy(self, ticket_id: str, length: int) -> None:
        """A segment was verified and is in place."""
        self._metrics.handoff_bytes.labels(transport=grpc_transport.NAME).inc(length)
        self._end_copy(ticket_id)

    def fail_copy(self, ticket_id: str, error: BaseException) -> None:
        """A segment was damaged, or could not be copied: the handoff has failed."""
        ticket = self.book.get(ticket_id)
        outcome = "checksum" if isinstance(error, ChecksumMismatch) else "error"
        self._release(ticket, outcome)
        self._end_copy(ticket_id)

    def _end_copy(self, ticket_id: str) -> None:
        ticket = self.book.get(ticket_id)
        was_quarantined = ticket.is_quarantined
        ticket.end_copy()
        if was_quarantined and not ticket.is_quarantined:
            self._pool.end_quarantine(ticket.missing)
            self.book.drop(ticket)

    # Endings

    def commit(self, ticket_id: str, writer: str, now: float) -> Receipt:
        """The sequence may run. Raises HandoffError where something is missing."""
        ticket = self.book.get(ticket_id)
        ticket.commit(writer)
        self.book.drop(ticket)
        # An attempt has one ticket for life: a reserve that comes late gets none.
        self.book.bury(ticket.attempt, now)
        self._count("ok")
        self._metrics.handoff_seconds.labels(transport=grpc_transport.NAME).observe(
            now - ticket.reserved_at
        )
        spec = self._specs.pop(ticket_id)
        return Receipt(spec, ticket.pinned + ticket.missing, ticket.expected_bytes)

    def renew(self, writer: str, ticket_ids: list[str], now: float) -> list[str]:
        """A writer's heartbeat. Returns the tickets that it must no longer write to."""
        ended = []
        for ticket_id in ticket_ids:
            try:
                ticket = self.book.get(ticket_id)
            except TicketEnded:
                ended.append(ticket_id)
                continue
            if ticket.is_open and ticket.writer == writer:
                ticket.renew(now)
            else:
                ended.append(ticket_id)
        return ended

    def abort(self, attempt: tuple[str, int], now: float) -> None:
        """End an attempt's ticket, or see that it never gets one; idempotent."""
        self.book.bury(attempt, now)
        ticket = self.book.find(attempt)
        if ticket is not None:
            self._release(ticket, "aborted")

    def sweep(self, now: float) -> None:
        """End what has expired."""
        for ticket in self.book.expired(now):
            self.book.bury(ticket.attempt, now)
            self._release(ticket, "expired")
        self.book.sweep(now)

    def close(self) -> None:
        """End every ticket."""
        for ticket in self.book:
            self._release(ticket, "aborted")

    def _release(self, ticket: Ticket, outcome: str) -> None:
        if not ticket.release():
            return
        self._specs.pop(ticket.ticket_id, None)
        self._pool.release(ticket.pinned)
        if ticket.is_quarantined:
            self._pool.quarantine(ticket.missing)
        else:
            self._pool.release(ticket.missing)
            self.book.drop(ticket)
        self._count(outcome)

    def _count(self, outcome: str) -> None:
        self._metrics.handoffs.labels(transport=grpc_transport.NAME, outcome=outcome).inc()
