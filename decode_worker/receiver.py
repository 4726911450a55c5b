"""The receiving end of handoffs: judges offers, reserves blocks, commits sequences.

The states of a ticket are those of ``kvtransfer.tickets``. A reserve that finds no room waits:

    waiting ─at the head of the queue, and there is room→ served
    waiting ─its caller leaves, its attempt ends, the worker takes nothing more→ gone

Sequences that have lost their blocks before come first. Only the head of the queue is checked. So a
queue of any length costs no more than one entry, and small prompts cannot always overtake a large
one. Owned by the event loop; ``now`` is passed in.
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
    spare: list[int] = field(default_factory=list)
    """Blocks for what its siblings write first, one each, once it has a ticket."""

    @property
    def attempt(self) -> AttemptName:
        """The request's id, and the number of this attempt."""
        return self.spec.request_id, self.spec.attempt


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
        self._identity = Identity(incarnation, fingerprint, geometry)
        self._promised: dict[str, Offer] = {}
        """By ticket."""
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
        # Nobody but this worker ever writes to these: they need no quarantine.
        offer.spare = self._pool.allocate(spec.choices - 1)
        self._promised[ticket.ticket_id] = offer
        self._spare += len(offer.spare)
        return ticket

    def check_offer(self, offer: Offer) -> None:
        """Check that it could be taken if there were room.

        Raises HandoffError, ContextLengthExceeded, and TicketEnded after an abort.
        """
        writer = Identity(offer.writer, offer.fingerprint, offer.geometry)
        check_peer(self._identity, writer, offer.incarnation)
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
            offer.spec.router_id == router_id and ticket_id != but
            for ticket_id, offer in self._promised.items()
        )

    def commit(self, ticket_id: str, writer: str, now: float) -> tuple[Offer, Ticket]:
        """The sequence may run. Its blocks are those that the ticket has pinned, then the others.

        Raises HandoffError where something is missing.
        """
        ticket = self.blocks.commit(ticket_id, writer, now)
        offer = self._promised.pop(ticket_id)
        self._spare -= len(offer.spare)
        return offer, ticket

    def _released(self, ticket: Ticket, error: BatonError) -> None:
        """A ticket has ended before its commit."""
        promised = self._promised.pop(ticket.ticket_id, None)
        if promised is not None:
            self._spare -= len(promised.spare)
            self._pool.release(promised.spare)


MAX_WAITING = 256
"""Reserves in the queue; each keeps a prompt in memory."""
FULL_RETRY_S = 1.0
"""Seconds after which a writer that finds the queue full may ask again."""


_Waiting = tuple[Offer, asyncio.Future[Ticket]]
"""An offer, and its answer. Done: the caller has left, or it was answered out of its turn."""


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
        queue.append((offer, answer))
        answer.add_done_callback(lambda _: self._keep(lambda waiting: waiting[1] is not answer))
        self.serve()
        if answer.done():
            answer.result()
        return answer

    def serve(self) -> None:
        """Answer as many as there is room for."""
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
        """Serve waiting reserves: blocks or places may have come back."""
        if len(self) and not self._serves_soon:
            self._serves_soon = True
            asyncio.get_running_loop().call_soon(self.serve)

    def check_again(self) -> None:
        """Serve even where counts show no room: blocks that others read come back unnoticed."""
        queue = self._preempted or self._others
        if queue:
            queue[0][0].min_blocks = 0
            self.serve_soon()

    def end(self, attempt: AttemptName, error: BatonError) -> None:
        """Answer the reserve of an attempt that is over with an error, if it waits."""
        self._refuse(error, lambda offer: offer.attempt == attempt)

    def close(self, error: BatonError) -> None:
        """Answer all with an error: the worker takes nothing more."""
        self._refuse(error, lambda offer: True)

    def _refuse(self, error: BatonError, concerns: Callable[[Offer], bool]) -> None:
        for offer, answer in (*self._preempted, *self._others):
            if concerns(offer) and not answer.done():
                answer.set_exception(error)
        self._keep(lambda waiting: not concerns(waiting[0]))

    def _keep(self, is_kept: Callable[[_Waiting], bool]) -> None:
        self._preempted = deque(filter(is_kept, self._preempted))
        self._others = deque(filter(is_kept, self._others))
