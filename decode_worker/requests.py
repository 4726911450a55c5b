"""The requests of a decode worker: handoffs, steps, aborts.

    reserve ─room, a ticket→ bytes arrive ─commit→ running ─a message per step→ ended
            ─no room→ refused ─its turn, and there is room→ granted: its router asks again

``decode_worker.local_prefill`` handles prompts that are computed here.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Iterator

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffError,
    NoRoom,
    TicketEnded,
    Unavailable,
    WorkerFailed,
)
from baton.grammar import TokenMatcher
from baton.request import AttemptName, FirstToken
from baton.v1 import worker_pb2
from decode_worker.local_prefill import LocalPrefill
from decode_worker.receiver import HandoffReceiver, Offer, asker_of
from decode_worker.sequences import RunningSequences
from engine.scheduling.sequence import Sequence, SequenceUpdate
from kvtransfer.tickets import Ticket
from worker.prefill.fetch_estimates import FetchEstimates
from worker.prefill.flow import PrefillFlow, attempt_of
from worker.role import WorkerContext
from worker.services import Keepalive

log = logging.getLogger(__name__)

ROUTER_GRACE_S = 5.0
"""Seconds without an open token stream after which a router counts as gone. Its sequences are then
ended."""


class DecodeRequests:
    """All requests of a decode worker. Owned by the worker's event loop."""

    def __init__(self, context: WorkerContext, estimates: FetchEstimates | None = None) -> None:
        """``estimates`` decide when cached blocks of local prompts are fetched from other workers.
        Without it, new ones are learned."""
        self.context = context
        self.closing = asyncio.Event()
        """Set once the worker begins to stop."""
        self.clock = context.exchange.receiver.clock
        """The clock that measures how long routers and writers are silent. Deadlines use the
        monotonic clock instead."""
        self.sequences = RunningSequences(context.settings.slot, self.clock)
        self._deadlines: dict[AttemptName, float] = {}
        """Deadlines of requests that have tickets, in seconds of the monotonic clock. For running
        sequences, the scheduler keeps the deadlines."""
        self.receiver = HandoffReceiver(
            context.engine.scheduler,
            context.exchange.receiver,
            fingerprint=context.engine.fingerprint,
            geometry=context.engine.cache.geometry,
            incarnation=context.incarnation,
        )
        self._grants_soon = False
        # A ticket that ends makes room.
        self._unsubscribe = context.exchange.receiver.subscribe(
            lambda _ticket, _error: self.grant_soon()
        )
        prompts = LocalPrefill(
            context,
            self.receiver,
            keep=self.sequences.keep,
            end=self._end_local,
            no_room=self._no_room,
        )
        self.flow = PrefillFlow(
            context,
            prompts.open,
            prefill_only=False,
            check=lambda request: self.check_new(request.sequence),
            estimates=estimates,
        )
        self.keepalive = Keepalive.of(context.settings.config)

    def has_work_of(self, router_id: str, but: str = "") -> bool:
        """Whether a sequence of this router decodes here, waits, or is being handed over.

        The sequence of ticket ``but`` is ignored.
        """
        return self.receiver.promises(router_id, but) or self.sequences.serve(router_id)

    # Handoffs

    def check_new(self, sequence: worker_pb2.SequenceSpec) -> None:
        """Check that this worker may take a request now, before the request's prompt is read.

        Raises NoRoom with this worker's load if counts show that there is no room: the router is
        told when it is the request's turn. Raises TicketEnded for an aborted request, and
        Unavailable if the worker accepts no more work."""
        attempt, book = (sequence.request_id, sequence.attempt), self.receiver.blocks.book
        if self.closing.is_set():
            raise stopping()
        if book.find(attempt) is not None:
            # The reserve was answered before, and its answer was lost.
            return
        self.context.intake.check()
        book.check_alive(attempt)
        with self._no_room():
            self.receiver.check_room(asker_of(sequence))

    @contextlib.contextmanager
    def _no_room(self) -> Iterator[None]:
        """Add this worker's load to a NoRoom that is raised within this context."""
        try:
            yield
        except NoRoom as full:
            full.load = self.context.core.load()
            # Others may wait for less than is free.
            self.grant_soon()
            raise

    def reserve(self, offer: Offer) -> Ticket:
        """Reserve blocks for an offer, as ``HandoffReceiver.reserve`` does. The request's grammar
        is compiled while the blocks arrive.

        ``check_new`` comes first. Raises NoRoom with this worker's load, and InvalidRequest for a
        token id that the model lacks.
        """
        self.context.check_token_ids(offer.spec)
        offer.deadline = time.monotonic() + offer.spec.deadline_s
        with self._no_room():
            ticket = self.receiver.reserve(offer, self.clock())
        if offer.spec.sampling.grammar is not None:
            self.context.grammars.begin(offer.spec.sampling.grammar, offer.spec.cache_salt)
        if not self.has_work_of(offer.spec.router_id, but=ticket.ticket_id):
            # From now on, the router's stream needs keepalives more often.
            self.sequences.outbox(offer.spec.router_id).hurry()
        self._deadlines[ticket.attempt] = offer.deadline
        self.context.core.schedule_soon()
        return ticket

    def must_wait(self, ticket_id: str) -> bool:
        """Whether the commit of a ticket has to wait for bytes of its blocks, or for its sequence's
        grammar."""
        spec = self.receiver.promised(ticket_id)
        if spec is not None and spec.sampling.grammar is not None:
            return True
        ticket = self.receiver.blocks.book.find_id(ticket_id)
        return ticket is not None and ticket.is_open and not ticket.is_complete

    async def commit_when_complete(
        self, ticket_id: str, writer: str, firsts: list[FirstToken]
    ) -> int:
        """Commit a ticket once all bytes of its blocks have arrived and its sequence's grammar is
        compiled. Returns the number of bytes transferred.

        Raises the error that has ended the ticket, or InvalidGrammar.
        """
        whole = self.receiver.blocks.whole(ticket_id)
        if whole is not None:
            # Another commit may wait for the same ticket.
            await asyncio.shield(whole)
        spec, matcher = self.receiver.promised(ticket_id), None
        if spec is not None and spec.sampling.grammar is not None:
            deadline = self._deadlines[(spec.request_id, spec.attempt)]
            # The caller's deadline bounds the compilation.
            with self.receiver.blocks.holding(ticket_id, writer):
                matcher = await self.context.grammars.ready(
                    spec.sampling.grammar, spec.cache_salt, deadline
                )
        return self.commit(ticket_id, writer, firsts, matcher)

    def commit(
        self,
        ticket_id: str,
        writer: str,
        firsts: list[FirstToken],
        matcher: TokenMatcher | None = None,
    ) -> int:
        """Add a handed-off sequence and its siblings to the batch.

        ``firsts`` are the first tokens of these sequences. ``matcher`` applies the request's
        grammar, if it has one. Returns the number of bytes that were transferred. Raises
        HandoffError, TicketEnded.
        """
        now = time.monotonic()
        vocab_size = self.context.engine.config.vocab_size
        if any(first.token_id >= vocab_size for first in firsts):
            raise HandoffError("the writer has sent a first token that the model does not have")
        offer, ticket = self.receiver.commit(ticket_id, writer, self.clock())
        spec, blocks = offer.spec, ticket.pinned + ticket.missing
        deadline = self._deadlines.pop((spec.request_id, spec.attempt))
        sequence = self.context.make_sequence(spec, arrived=now, deadline=deadline)
        sequence.follow(matcher)
        sequence.hashes = offer.hashes or []
        sequence.token_ids.append(firsts[0].token_id)
        sequence.spare = offer.spare
        if len(firsts) != 1 + len(sequence.siblings):
            self.context.engine.pool.release(blocks + offer.spare)
            raise HandoffError(f"{len(firsts)} first tokens for {spec.choices} choices")
        self.sequences.keep(sequence)
        self.context.core.add_computed(sequence, blocks, len(spec.token_ids))
        forks = self._fork(sequence, firsts[1:])
        # The first tokens are sent again: if the prefill worker dies before it answers, none is
        # lost.
        for choice, first in zip((sequence, *forks), firsts, strict=True):
            self.sequences.send(
                choice, (first.token_id,), () if first.logprobs is None else (first.logprobs,)
            )
            if choice.finish_reason:
                self._forget(attempt_of(choice), choice.choice)
        self.sequences.outbox(spec.router_id).flush()
        return ticket.expected_bytes

    def _fork(self, sequence: Sequence, others: list[FirstToken]) -> list[Sequence]:
        """Start a sequence's siblings. ``others`` are the siblings' first tokens; it is empty if
        there are no siblings.

        Returns the siblings. Each of them may have ended with its first token.
        """
        if not others:
            return []
        scheduler = self.context.engine.scheduler
        forks = scheduler.fork(sequence, (other.token_id for other in others))
        sequence.finish_reason = scheduler.finish_reason(sequence, sequence.token_ids[-1])
        if sequence.finish_reason:
            self.context.core.remove(sequence)
        return forks

    def _end_local(self, sequence: Sequence) -> None:
        """End a local prompt that was given up before its first token. Does nothing if the sequence
        has left this worker."""
        if sequence in self.sequences:
            self.abort(attempt_of(sequence))

    def abort(self, attempt: AttemptName, choice: int | None = None) -> None:
        """End a request in any state, or one of its running choices; idempotent."""
        if choice is None:
            self.receiver.blocks.abort(attempt, self.clock())
            self._give_up_turn(attempt)
            self.flow.end(attempt, _aborted())
        for sequence in self._forget(attempt, choice):
            self.context.core.remove(sequence)
        self.context.core.schedule_steps()

    def abort_handoff(self, attempt: AttemptName) -> None:
        """End the ticket of an attempt because its writer gives up; idempotent.

        A committed sequence continues, because its writer may not know about the commit. The router
        ends sequences that run.
        """
        self.receiver.blocks.abort(attempt, self.clock())
        self._deadlines.pop(attempt, None)
        self.context.core.schedule_steps()

    def _forget(self, attempt: AttemptName, choice: int | None = None) -> list[Sequence]:
        """Remove a request, or one of its choices. Returns the sequences that were removed."""
        gone = self.sequences.forget(attempt, choice)
        if not self.sequences.has(attempt):
            self._deadlines.pop(attempt, None)
        self.grant_soon()
        return gone

    # Room

    @property
    def is_full(self) -> bool:
        """Whether sequences have all places of the batch, as the load shows."""
        scheduler = self.context.engine.scheduler
        sequences = len(scheduler.running) + len(scheduler.waiting)
        return sequences >= scheduler.limits.max_sequences

    def grant_soon(self) -> None:
        """Grant room to the requests whose turn it is in the event loop's next iteration, because
        blocks or places in the batch may be free again."""
        if not self._grants_soon and (self.receiver.turns or self.sequences.is_known_full):
            self._grants_soon = True
            asyncio.get_running_loop().call_soon(self.grant)

    def grant(self) -> None:
        """Grant free room to the requests whose turn it is, and tell their routers."""
        self._grants_soon = False
        if not self.is_full:
            self.sequences.tell_places()
        for grant in self.receiver.grant_room(self.clock(), self.sequences.is_read):
            self.sequences.outbox(grant.asker.router_id).grant(grant.asker.attempt)

    def _give_up_turn(self, attempt: AttemptName) -> None:
        self.receiver.turns.leave(attempt)
        self.grant_soon()

    def expire(self, now: float) -> None:
        """End requests whose deadline has passed, and requests of routers that have stopped reading
        their token streams."""
        for attempt, deadline in list(self._deadlines.items()):
            if deadline <= now:
                self.abort(attempt)
        for router_id in self.sequences.lost_routers(ROUTER_GRACE_S):
            log.info("router %s is gone: its sequences end", router_id)
            self.receiver.turns.leave_router(router_id)
            for attempt in self.sequences.attempts(router_id):
                self.abort(attempt)

    def end_all(self) -> None:
        """End every sequence and ticket. Token streams end once ``closing`` is set."""
        self.closing.set()
        self.receiver.turns.clear()
        self.receiver.blocks.close()
        error = WorkerFailed("the decode worker is stopping")
        for sequence in self.sequences.each():
            self._fail(sequence, error)
            self.context.core.remove(sequence)
        self.flow.close(error)
        self.sequences.flush()
        self._unsubscribe()
        self.receiver.close()

    # Steps

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        """Send the tokens of a step to the routers of its sequences."""
        for update in updates:
            if update.token_ids:
                sequence = update.sequence
                self.sequences.send(sequence, update.token_ids, update.logprobs)
                if sequence.finish_reason:
                    self._forget(attempt_of(sequence), sequence.choice)
        self.flow.on_emit(updates)
        self.hand_back()
        self.sequences.flush()
        self.grant_soon()

    def hand_back(self) -> None:
        """Hand sequences that have lost their blocks back to their routers, after all tokens."""
        for sequence in self.context.engine.scheduler.take_handed_back():
            if sequence in self.sequences:
                self._forget(attempt_of(sequence), sequence.choice)
                self.sequences.send_end(sequence)

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        """Report ``error`` to the routers of sequences that have ended because their step
        failed."""
        for sequence in sequences:
            self._fail(sequence, error)
        self.sequences.flush()

    def on_expire(self, sequences: list[Sequence]) -> None:
        """Report to their routers that these sequences have ended because their deadline has
        passed."""
        self.on_fail(sequences, DeadlineExceeded("the request's deadline has passed"))

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        """End a sequence that has left the scheduler, and its siblings, with an error."""
        self.sequences.send_end(sequence, error)
        for other in self._forget(attempt_of(sequence)):
            if other is not sequence:
                self.context.engine.scheduler.remove(other)
        self.flow.end(attempt_of(sequence), error)


def _aborted() -> TicketEnded:
    return TicketEnded("the request was aborted")


def stopping() -> Unavailable:
    """Return the error for calls to a worker that is stopping."""
    return Unavailable("this decode worker is stopping")
