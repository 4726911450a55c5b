"""The receiving end of handoffs: judges offers, reserves blocks, commits sequences.

The states are those of ``kvtransfer.tickets.ticket``. Owned by the event loop; ``now`` is
passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

from baton.errors import BatonError, ContextLengthExceeded, HandoffError, TicketEnded
from baton.hashing import block_hashes, hash_key, last_hashes
from baton.request import Geometry, SequenceSpec
from decode_worker.room import Room
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from kvtransfer.pairs.pair import Identity, check_peer
from kvtransfer.tickets.ticket import Attempt, Ticket
from worker.exchange.block_receiver import BlockReceiver


@dataclass(slots=True)
class Offer:
    """What a writer says of itself and of the sequence that it wants to hand over.

    An offer that waits for room keeps its hashes, so that its prompt is hashed once.
    """

    fingerprint: str
    geometry: Geometry
    incarnation: str
    writer: str
    spec: SequenceSpec
    deadline: float | None = None
    """In seconds of this worker's monotonic clock; None: it counts from the promise."""
    hashes: list[bytes] | None = None
    """Hashes of the full hash blocks of its tokens, once they were needed."""
    min_blocks: int = 0
    """How many must be available before another look at the cache is worthwhile."""

    @property
    def attempt(self) -> Attempt:
        """The request's id, and the number of this attempt."""
        return self.spec.request_id, self.spec.attempt


@dataclass(frozen=True, slots=True)
class Receipt:
    """A committed ticket: the sequence's blocks in order."""

    spec: SequenceSpec
    hashes: list[bytes]
    """Of the full hash blocks of its tokens."""
    blocks: list[int]
    bytes: int
    spare: list[int]
    """For what its siblings write first: one block each."""


@dataclass(frozen=True, slots=True)
class _Promised:
    """What a ticket is for."""

    spec: SequenceSpec
    hashes: list[bytes]
    spare: list[int]


class HandoffReceiver:
    """Judges offers; the blocks' own receiver does the rest."""

    def __init__(
        self,
        scheduler: Scheduler,
        blocks: BlockReceiver,
        *,
        fingerprint: str,
        geometry: Geometry,
        incarnation: str,
    ) -> None:
        self.blocks = blocks
        self._scheduler = scheduler
        self._pool: BlockPool = scheduler.pool
        self._fingerprint = fingerprint
        self._geometry = geometry
        self._incarnation = incarnation
        self._promised: dict[str, _Promised] = {}
        self._spare = 0
        """Blocks, and as many places, promised to siblings."""
        self._room = Room(scheduler)
        self._unsubscribe = blocks.subscribe(self._released)

    def close(self) -> None:
        """Take no notice of tickets any more; idempotent."""
        self._unsubscribe()

    def reserve(self, offer: Offer, now: float) -> Ticket:
        """Promise blocks. Raises HandoffError, NoRoom or ContextLengthExceeded.

        Where a count alone shows that there is no room, the prompt is not hashed. The offer keeps
        hashes that were computed.
        """
        self.check_offer(offer)
        spec, attempt = offer.spec, offer.attempt
        known = self.blocks.book.find(attempt)
        if known is not None:
            if known.writer == offer.writer and known.is_open:
                known.renew(now)
                return known
            raise TicketEnded(f"request {spec.request_id} attempt {spec.attempt} has a ticket")
        limits = self._scheduler.limits
        self.check_count(max(offer.min_blocks, spec.choices - 1), spec, now)
        if offer.hashes is None:
            key = hash_key(self._fingerprint, spec.cache_salt)
            offer.hashes = block_hashes(spec.token_ids, limits.hash_block, key)
        hashes = offer.hashes
        pinned = self._pool.match(last_hashes(hashes, limits.hashes_per_block))
        wanted = self._blocks(spec) - len(pinned)
        offer.min_blocks = wanted + self._pool.evictable(pinned)
        self.check_room(wanted, pinned, spec, now)
        ticket = self.blocks.promise(
            attempt,
            offer.writer,
            missing=wanted - (spec.choices - 1),
            pinned=pinned,
            now=now,
            geometry=offer.geometry,
        )
        # Nobody but this worker ever writes to these: they need no quarantine.
        spare = self._pool.allocate(spec.choices - 1)
        self._promised[ticket.ticket_id] = _Promised(spec, hashes, spare)
        self._spare += len(spare)
        return ticket

    def check_offer(self, offer: Offer) -> None:
        """Check that it could be taken if there were room.

        Raises HandoffError, ContextLengthExceeded, and TicketEnded after an abort.
        """
        own = Identity(self._incarnation, self._fingerprint, self._geometry)
        check_peer(
            own, Identity(offer.writer, offer.fingerprint, offer.geometry), offer.incarnation
        )
        spec = offer.spec
        # The first token comes along; what is left must be more than nothing, or it never ends.
        if len(spec.token_ids) + 1 >= self._scheduler.limits.context_length:
            raise ContextLengthExceeded(
                f"{len(spec.token_ids)} tokens leave no room to generate: "
                f"this worker's context is {self._scheduler.limits.context_length} tokens"
            )
        if len(spec.token_ids) + 1 - spec.prompt_length >= spec.sampling.max_tokens:
            raise HandoffError("the first token is the last: nothing is left to generate here")
        self._room.check_ever(self._blocks(spec))
        self.blocks.book.check_alive(offer.attempt)

    def _blocks(self, spec: SequenceSpec) -> int:
        """Blocks of its tokens, and one that each sibling writes first."""
        return -(-len(spec.token_ids) // self._scheduler.limits.block_size) + spec.choices - 1

    def check_room(self, count: int, pinned: list[int], spec: SequenceSpec, now: float) -> None:
        """See ``Room.check``. Raises NoRoom, HandoffError."""
        self._room.check(count, pinned, spec, promised=self._places, now=now)

    def check_count(self, count: int, spec: SequenceSpec, now: float) -> None:
        """Check the room without a look at the cache: see ``Room.check_count``. Raises NoRoom."""
        self._room.check_count(count, spec, promised=self._places, now=now)

    @property
    def _places(self) -> int:
        """Places that are promised."""
        return len(self.blocks.book) + self._spare

    def promised(self, ticket_id: str) -> SequenceSpec | None:
        """What an open ticket is for."""
        found = self._promised.get(ticket_id)
        return None if found is None else found.spec

    def promises(self, router_id: str, but: str = "") -> bool:
        """Whether a ticket is open for a sequence of this router, beside the ticket ``but``."""
        return any(
            promised.spec.router_id == router_id and ticket_id != but
            for ticket_id, promised in self._promised.items()
        )

    def commit(self, ticket_id: str, writer: str, now: float) -> Receipt:
        """The sequence may run. Raises HandoffError where something is missing."""
        ticket = self.blocks.commit(ticket_id, writer, now)
        promised = self._promised.pop(ticket_id)
        self._spare -= len(promised.spare)
        blocks = ticket.pinned + ticket.missing
        return Receipt(
            promised.spec, promised.hashes, blocks, ticket.expected_bytes, promised.spare
        )

    def _released(self, ticket: Ticket, error: BatonError) -> None:
        """A ticket has ended before its commit."""
        promised = self._promised.pop(ticket.ticket_id, None)
        if promised is not None:
            self._spare -= len(promised.spare)
            self._pool.release(promised.spare)
