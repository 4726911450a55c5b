"""The receiving end of handoffs: checks offers, reserves blocks, commits sequences.

``kvtransfer.tickets`` has the states of a ticket. A reserve that finds no room is refused at once
(``decode_worker.room``). Owned by the event loop; ``now`` is passed in.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from baton.errors import BatonError, ContextLengthExceeded, HandoffError, TicketEnded
from baton.hashing import block_hashes, hash_key, last_hashes
from baton.request import AttemptName, Geometry, SequenceSpec
from baton.v1 import worker_pb2
from decode_worker.room import Room
from decode_worker.room_turns import Asker, Grant, RoomTurns
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from kvtransfer.pairs.pair import Identity, check_peer
from kvtransfer.tickets import Ticket
from worker.exchange.block_receiver import BlockReceiver


@dataclass(slots=True)
class Offer:
    """A handoff that a writer offers: the writer's identity, and the sequence."""

    fingerprint: str
    geometry: Geometry
    incarnation: str
    writer: str
    spec: SequenceSpec
    deadline: float | None = None
    """Deadline of the request, in seconds of this worker's monotonic clock. None until blocks are
    reserved for the offer."""
    hashes: list[bytes] = field(default_factory=list)
    """Hashes of the prompt's full hash blocks; empty until blocks are reserved."""
    spare: list[int] = field(default_factory=list)
    """Blocks for the first writes of the sequence's siblings, one each; allocated with the
    ticket."""

    @property
    def attempt(self) -> AttemptName:
        """The request's id, and the number of the attempt to which the offer belongs."""
        return self.spec.request_id, self.spec.attempt


class HandoffReceiver:
    """Checks the handoffs that writers offer, and reserves their blocks through the block
    receiver."""

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
        self._identity = Identity(incarnation, fingerprint, geometry)
        self._promised: dict[str, Offer] = {}
        """Offers whose tickets are open, by ticket id."""
        self._spare = 0
        """Number of blocks reserved for the siblings of all sequences with open tickets. A place in
        the batch is also reserved for each sibling."""
        self._room = Room(scheduler)
        self._unsubscribe = blocks.subscribe(self._released)

    def close(self) -> None:
        """Stop receiving reports of released tickets; idempotent."""
        self._unsubscribe()

    def reserve(self, offer: Offer, now: float) -> Ticket:
        """Reserve blocks for an offer. Returns its ticket.

        Raises HandoffError, NoRoom or ContextLengthExceeded. If the counts alone show that there is
        no room, the prompt is not hashed.
        """
        self.check_offer(offer)
        spec, attempt = offer.spec, offer.attempt
        known = self.blocks.book.find(attempt)
        if known is not None:
            if known.writer == offer.writer and known.is_open:
                known.renew(now)
                return known
            raise TicketEnded(
                f"request {spec.request_id} attempt {spec.attempt} already has a ticket"
            )
        limits, asker = self._scheduler.limits, asker_of(spec)
        self.check_room(asker)
        key = hash_key(self._identity.fingerprint, spec.cache_salt)
        offer.hashes = block_hashes(spec.token_ids, limits.hash_block, key)
        pinned = self._pool.match(last_hashes(offer.hashes, limits.hashes_per_block))
        wanted = self._blocks(spec) - len(pinned)
        self.take_room(asker, wanted + self._pool.evictable(pinned))
        ticket = self.blocks.promise(
            attempt,
            offer.writer,
            missing=wanted - (spec.choices - 1),
            pinned=pinned,
            now=now,
            geometry=offer.geometry,
        )
        # Only this worker writes to these blocks, so they need no quarantine.
        offer.spare = self._pool.allocate(spec.choices - 1)
        self._promised[ticket.ticket_id] = offer
        self._spare += len(offer.spare)
        return ticket

    def check_offer(self, offer: Offer) -> None:
        """Raise an error if the offer must be refused however much room there is: HandoffError,
        ContextLengthExceeded or TicketEnded."""
        writer = Identity(offer.writer, offer.fingerprint, offer.geometry)
        check_peer(self._identity, writer, offer.incarnation)
        spec = offer.spec
        # The first token arrives with the handoff. At least one more must be left to generate.
        if len(spec.token_ids) + 1 >= self._scheduler.limits.context_length:
            raise ContextLengthExceeded(
                f"{len(spec.token_ids)} tokens leave no room to generate: "
                f"this worker's context is {self._scheduler.limits.context_length} tokens"
            )
        if len(spec.token_ids) + 1 - spec.prompt_length >= spec.sampling.max_tokens:
            raise HandoffError("the first token is the last: nothing is left to generate here")
        self.check_ever(self._blocks(spec))
        self.blocks.book.check_alive(offer.attempt)

    def _blocks(self, spec: SequenceSpec) -> int:
        """Return the number of blocks for a sequence's tokens, plus one for each sibling's first
        write."""
        return -(-len(spec.token_ids) // self._scheduler.limits.block_size) + spec.choices - 1

    @property
    def turns(self) -> RoomTurns:
        """The requests that were refused here, and wait for room."""
        return self._room.turns

    def check_ever(self, count: int) -> None:
        """Check that there can be room for ``count`` blocks. Raises HandoffError."""
        self._room.check_ever(count)

    def check_room(self, asker: Asker, count: int | None = None) -> None:
        """Check that there is room for a request that takes ``count`` of the available blocks; see
        ``Room.check``.

        None: the number that the request takes even if its whole prompt is cached. Raises
        NoRoom."""
        least = asker.choices - 1 if count is None else count
        self._room.check(asker, least, promised=self._places)

    def take_room(self, asker: Asker, count: int) -> None:
        """Check the room as ``check_room`` does, for a request that now takes it. Raises NoRoom."""
        self._room.take(asker, count, promised=self._places)

    def grant_room(self, now: float, is_there: Callable[[str], bool]) -> list[Grant]:
        """Grant free room to the requests whose turn it is; see ``Room.grant``."""
        return self._room.grant(promised=self._places, now=now, is_there=is_there)

    @property
    def _places(self) -> int:
        """Number of places in the batch that are reserved for sequences with open tickets and for
        their siblings."""
        return len(self.blocks.book) + self._spare

    def promised(self, ticket_id: str) -> SequenceSpec | None:
        """Return the sequence for which a ticket is open; None if there is no such ticket."""
        found = self._promised.get(ticket_id)
        return None if found is None else found.spec

    def promises(self, router_id: str, but: str = "") -> bool:
        """Whether a ticket other than ``but`` is open for a sequence of this router."""
        return any(
            offer.spec.router_id == router_id and ticket_id != but
            for ticket_id, offer in self._promised.items()
        )

    def commit(self, ticket_id: str, writer: str, now: float) -> tuple[Offer, Ticket]:
        """End a ticket because its sequence may start to decode. The sequence owns the ticket's
        blocks from now on: the pinned blocks, followed by the missing ones.

        Raises HandoffError if bytes are missing.
        """
        ticket = self.blocks.commit(ticket_id, writer, now)
        offer = self._promised.pop(ticket_id)
        self._spare -= len(offer.spare)
        return offer, ticket

    def _released(self, ticket: Ticket, error: BatonError) -> None:
        """Forget a ticket that ended before its commit, and release its siblings' blocks."""
        promised = self._promised.pop(ticket.ticket_id, None)
        if promised is not None:
            self._spare -= len(promised.spare)
            self._pool.release(promised.spare)


def asker_of(spec: SequenceSpec | worker_pb2.SequenceSpec) -> Asker:
    """Return what the rules for room need of a request. Its prompt is not read."""
    attempt = spec.request_id, spec.attempt
    preempted = spec.preemptions > 0
    return Asker(spec.router_id, attempt, spec.choices or 1, preempted, spec.choice)
