"""The receiving end of handoffs: checks offers, reserves blocks, commits sequences.

``kvtransfer.tickets`` has the states of a ticket. A reserve that finds no room waits:

    waiting ─at the head of the queue, and there is room→ served
    waiting ─its caller leaves, its attempt ends, the worker takes nothing more→ ended

Preempted sequences come first. Only the head of the queue is checked. So a queue of any length
costs no more than one entry, and small prompts cannot always overtake a large one. Owned by the
event loop; ``now`` is passed in.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from baton.errors import BatonError, ContextLengthExceeded, HandoffError, NoRoom, TicketEnded
from baton.hashing import block_hashes, hash_key, last_hashes
from baton.request import AttemptName, Geometry, SequenceSpec
from decode_worker.room import Room
from engine.scheduling.block_pool import BlockPool
from engine.scheduling.scheduler import Scheduler
from kvtransfer.pairs.pair import Identity, check_peer
from kvtransfer.tickets import Ticket
from worker.exchange.block_receiver import BlockReceiver


@dataclass(slots=True)
class Offer:
    """A handoff that a writer offers: the writer's identity, and the sequence.

    An offer that waits for room keeps its hashes, so that its prompt is hashed only once.
    """

    fingerprint: str
    geometry: Geometry
    incarnation: str
    writer: str
    spec: SequenceSpec
    deadline: float | None = None
    """Deadline of the request, in seconds of this worker's monotonic clock. None until blocks are
    reserved for the offer."""
    hashes: list[bytes] | None = None
    """Hashes of the prompt's full hash blocks; None until they are needed."""
    min_blocks: int = 0
    """Number of blocks that must be available before the prompt is looked up in the prefix cache
    again."""
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
        no room, the prompt is not hashed. Hashes that were computed are kept in the offer.
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
        limits = self._scheduler.limits
        self.check_count(max(offer.min_blocks, spec.choices - 1), spec, now)
        if offer.hashes is None:
            key = hash_key(self._identity.fingerprint, spec.cache_salt)
            offer.hashes = block_hashes(spec.token_ids, limits.hash_block, key)
        pinned = self._pool.match(last_hashes(offer.hashes, limits.hashes_per_block))
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
        self._room.check_ever(self._blocks(spec))
        self.blocks.book.check_alive(offer.attempt)

    def _blocks(self, spec: SequenceSpec) -> int:
        """Return the number of blocks for a sequence's tokens, plus one for each sibling's first
        write."""
        return -(-len(spec.token_ids) // self._scheduler.limits.block_size) + spec.choices - 1

    def check_room(self, count: int, pinned: list[int], spec: SequenceSpec, now: float) -> None:
        """Check that there is room for a sequence: see ``Room.check``. Raises NoRoom,
        HandoffError."""
        self._room.check(count, pinned, spec, promised=self._places, now=now)

    def check_count(self, count: int, spec: SequenceSpec, now: float) -> None:
        """Check the room for a sequence without a cache lookup: see ``Room.check_count``. Raises
        NoRoom."""
        self._room.check_count(count, spec, promised=self._places, now=now)

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


MAX_WAITING = 256
"""Maximum reserves in the queue; each keeps a prompt in memory."""
FULL_RETRY_S = 1.0
"""Seconds after which a writer that finds the queue full may try again."""


_Waiting = tuple[Offer, asyncio.Future[Ticket]]
"""An offer, and the future of its ticket. The future is done if the caller has left, or the offer
was answered early."""


class ReserveQueue:
    """Queue of offers that wait for room. An offer is answered at once if there is room; otherwise
    offers are answered in order."""

    def __init__(self, reserve: Callable[[Offer], Ticket], max_waiting: int = MAX_WAITING) -> None:
        """``reserve`` reserves blocks for an offer; it raises NoRoom if too few are free."""
        self._reserve = reserve
        self._max_waiting = max_waiting
        self._preempted: deque[_Waiting] = deque()
        self._others: deque[_Waiting] = deque()
        self._serves_soon = False
        self.answered = 0
        """Number of reserves that were answered from the queue; other code only reads it."""

    def __len__(self) -> int:
        """The number of waiting reserves."""
        return len(self._preempted) + len(self._others)

    def add(self, offer: Offer) -> asyncio.Future[Ticket]:
        """Reserve blocks for an offer as soon as there is room and all earlier offers are answered.

        A caller that cancels the future leaves the queue. Raises what ``reserve`` raises if the
        offer need not wait, and NoRoom if the queue is full.
        """
        if len(self) >= self._max_waiting:
            raise NoRoom(
                f"{self._max_waiting} other handoffs wait for room here", retry_after=FULL_RETRY_S
            )
        answer: asyncio.Future[Ticket] = asyncio.get_running_loop().create_future()
        queue = self._preempted if offer.spec.preemptions else self._others
        queue.append((offer, answer))
        answer.add_done_callback(lambda _: self._keep(lambda waiting: waiting[1] is not answer))
        self.serve()
        if answer.done():
            answer.result()
        return answer

    def serve(self) -> None:
        """Answer waiting reserves in order, as long as there is room."""
        self._serves_soon = False
        while queue := self._preempted or self._others:
            offer, answer = queue[0]
            if not answer.done():
                try:
                    answer.set_result(self._reserve(offer))
                except NoRoom:
                    return
                except Exception as error:
                    answer.set_exception(error)
                self.answered += 1
            queue.popleft()

    def serve_soon(self) -> None:
        """Answer waiting reserves in the event loop's next iteration, because blocks or places in
        the batch may be free again."""
        if len(self) and not self._serves_soon:
            self._serves_soon = True
            asyncio.get_running_loop().call_soon(self.serve)

    def check_again(self) -> None:
        """Answer waiting reserves even if the counts showed no room before. Workers that read
        cached blocks unpin them without a notice to this queue."""
        queue = self._preempted or self._others
        if queue:
            queue[0][0].min_blocks = 0
            self.serve_soon()

    def end(self, attempt: AttemptName, error: BatonError) -> None:
        """Fail the waiting reserve of an attempt with ``error``, if there is such a reserve. The
        attempt is over."""
        self._refuse(error, lambda offer: offer.attempt == attempt)

    def close(self, error: BatonError) -> None:
        """Fail all waiting reserves with ``error``, because the worker accepts no more work."""
        self._refuse(error, lambda offer: True)

    def _refuse(self, error: BatonError, concerns: Callable[[Offer], bool]) -> None:
        for offer, answer in (*self._preempted, *self._others):
            if concerns(offer) and not answer.done():
                answer.set_exception(error)
        self._keep(lambda waiting: not concerns(waiting[0]))

    def _keep(self, is_kept: Callable[[_Waiting], bool]) -> None:
        self._preempted = deque(filter(is_kept, self._preempted))
        self._others = deque(filter(is_kept, self._others))
