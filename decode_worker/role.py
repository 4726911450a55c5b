"""The decode role: takes handoffs in, batches continuously, streams tokens to the routers."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator

import grpc.aio

from baton.errors import (
    BatonError,
    DeadlineExceeded,
    HandoffError,
    Overloaded,
    TicketEnded,
    Unavailable,
    WorkerFailed,
)
from baton.grammar import TokenMatcher
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason, FirstToken, TokenOutput
from baton.v1 import decode_pb2, decode_pb2_grpc, prefill_pb2_grpc
from decode_worker.handoff_stream import Context as HandoffsContext
from decode_worker.handoff_stream import HandoffStream
from decode_worker.local_prefill import LocalPrefill
from decode_worker.outbox import Outbox
from decode_worker.receiver import HandoffReceiver, Offer
from decode_worker.reserves import Reserves
from decode_worker.sequence_spans import SequenceSpans
from decode_worker.service import DecodeServicer
from engine.scheduling.sequence import Sequence, SequenceUpdate
from kvtransfer.tickets.ticket import Attempt, Ticket
from worker.fetch.fetch import Fetcher
from worker.fetch.fetch_estimates import FetchEstimates
from worker.role import WorkerContext
from worker.services.beats import Beats
from worker.services.prefill_service import PrefillServicer

log = logging.getLogger(__name__)

ROUTER_GRACE_S = 5.0
"""Sequences of a router that has had no stream open for this long are ended."""


class DecodeRole:
    """Implements ``worker.role.Role``. Owned by the control loop."""

    def __init__(self, context: WorkerContext, estimates: FetchEstimates | None = None) -> None:
        """``estimates`` say when cached blocks of a prompt that is computed here are fetched; new

        ones are made if it is absent.
        """
        self.context = context
        self.receiver = HandoffReceiver(
            context.engine.scheduler,
            context.exchange.receiver,
            fingerprint=context.engine.fingerprint,
            geometry=context.engine.cache.geometry(),
            incarnation=context.incarnation,
        )
        self.clock = context.exchange.receiver.clock
        """The clock of peers' silence; deadlines are on the monotonic clock."""
        self.closing = False
        self.local = LocalPrefill(
            context,
            self.receiver,
            Fetcher(context, estimates or FetchEstimates()),
            keep=self._keep,
            end=self._end_local,
            # Prompts that are computed here, and reserves that wait, take turns.
            turn=lambda: self.reserves.answered if self.reserves else None,
        )
        self._outboxes: dict[str, Outbox] = {}
        self._spans = SequenceSpans(context.settings.slot)
        self._sequences: dict[Attempt, dict[int, Sequence]] = {}
        """Of each request its choices, by number, those that have not begun yet included."""
        self._deadlines: dict[Attempt, float] = {}
        """Of requests that have tickets. A sequence has its own, which the control loop keeps."""
        self.beats = Beats.of(context.settings.config)
        self._prefills = PrefillServicer(self.local.run, context.core.load, self.beats)
        self._streams: set[HandoffStream] = set()
        self.reserves = Reserves(self.receiver, context.intake, self.reserve)
        # Blocks of tickets that end may be what a reserve waits for.
        self._unsubscribe = context.exchange.receiver.subscribe(
            lambda _ticket, _error: self.reserves.serve_soon()
        )

    def mount(self, server: grpc.aio.Server) -> None:
        """Add DecodeService, and PrefillService for prompts that are computed here."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(self), server)
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._prefills, server)

    def outbox(self, router_id: str) -> Outbox:
        """A router's outbox, made when it is first needed."""
        if router_id not in self._outboxes:
            self._outboxes[router_id] = Outbox(self.clock())
        return self._outboxes[router_id]

    def has_work_of(self, router_id: str, but: str = "") -> bool:
        """Whether a sequence of this router runs here, waits, or is being handed over.

        The ticket ``but`` does not count.
        """
        if self.receiver.promises(router_id, but):
            return True
        every = (choice for choices in self._sequences.values() for choice in choices.values())
        return any(sequence.spec.router_id == router_id for sequence in every)

    async def answer_handoffs(
        self, requests: AsyncIterator[decode_pb2.HandoffsRequest], context: HandoffsContext
    ) -> None:
        """A writer's calls, until it leaves. Raises Unavailable when this worker stops."""
        if self.closing:
            raise _stopping()
        stream = HandoffStream(self, context)
        self._streams.add(stream)
        try:
            await stream.run(requests)
        finally:
            self._streams.discard(stream)

    def reserve(self, offer: Offer) -> Ticket:
        """See ``HandoffReceiver.reserve``. Its grammar is compiled while its blocks arrive.

        Raises NoRoom, and Unavailable where the worker takes nothing more.
        """
        self.context.intake.check()
        if offer.deadline is None:
            offer.deadline = time.monotonic() + offer.spec.deadline_s
        ticket = self.receiver.reserve(offer, self.clock())
        if offer.spec.sampling.grammar is not None:
            # Where too many others wait to be compiled, its commit begins it.
            with contextlib.suppress(Overloaded):
                self.context.grammars.begin(offer.spec.sampling.grammar)
        if not self.has_work_of(offer.spec.router_id, but=ticket.ticket_id):
            # From now on it is to say more often that it lives.
            self.outbox(offer.spec.router_id).hurry()
        self._deadlines[ticket.attempt] = offer.deadline
        self.context.core.schedule_soon()
        return ticket

    def opened(self, ticket_id: str) -> asyncio.Future[None] | None:
        """See ``BlockReceiver.opened``."""
        return self.receiver.blocks.opened(ticket_id)

    def awaits_bytes(self, ticket_id: str) -> bool:
        """Whether some of a ticket's are still to come."""
        try:
            ticket = self.receiver.blocks.book.get(ticket_id)
        except TicketEnded:
            return False
        return ticket.is_open and not ticket.is_complete

    def must_wait(self, ticket_id: str) -> bool:
        """Whether a commit has to wait: for bytes, or for its sequence's grammar."""
        spec = self.receiver.promised(ticket_id)
        return (spec is not None and spec.sampling.grammar is not None) or self.awaits_bytes(
            ticket_id
        )

    async def commit_when_complete(
        self,
        ticket_id: str,
        writer: str,
        first_token: int,
        *,
        logprobs: TokenLogprobs | None = None,
        others: tuple[FirstToken, ...] = (),
    ) -> int:
        """``commit``, as soon as every byte is in place and its grammar is compiled.

        Raises what has ended the ticket, or InvalidGrammar.
        """
        if self.awaits_bytes(ticket_id):
            whole = self.receiver.blocks.whole(ticket_id)
            assert whole is not None, "bytes are still to come"
            # Another commit may wait for the same ticket.
            await asyncio.shield(whole)
        spec, matcher = self.receiver.promised(ticket_id), None
        if spec is not None and spec.sampling.grammar is not None:
            deadline = self._deadlines[(spec.request_id, spec.attempt)]
            # Compiling has no bound of its own: the caller's deadline bounds it.
            with self.receiver.blocks.holding(ticket_id, writer):
                matcher = await self.context.grammars.ready(spec.sampling.grammar, deadline)
        return self.commit(
            ticket_id, writer, first_token, logprobs=logprobs, others=others, matcher=matcher
        )

    def commit(
        self,
        ticket_id: str,
        writer: str,
        first_token: int,
        *,
        logprobs: TokenLogprobs | None = None,
        others: tuple[FirstToken, ...] = (),
        matcher: TokenMatcher | None = None,
    ) -> int:
        """Join a handed-off sequence and its siblings to the batch.

        ``logprobs`` are those of its first token, ``others`` the siblings' first tokens,
        ``matcher`` is that of its grammar. Returns the bytes that crossed the wire.
        """
        now = time.monotonic()
        receipt = self.receiver.commit(ticket_id, writer, self.clock())
        spec = receipt.spec
        deadline = self._deadlines.pop((spec.request_id, spec.attempt))
        sequence = self.context.make_sequence(spec, arrived=now, deadline=deadline)
        sequence.follow(matcher)
        sequence.hashes = receipt.hashes
        sequence.token_ids.append(first_token)
        sequence.spare = receipt.spare
        if len(others) != len(sequence.siblings):
            self.context.engine.pool.release(receipt.blocks + receipt.spare)
            raise HandoffError(f"{1 + len(others)} first tokens for {spec.choices} choices")
        self._keep(sequence)
        self.context.core.add_computed(sequence, receipt.blocks, len(spec.token_ids))
        forks = self._fork(sequence, others)
        # Told again: a prefill worker that dies before its answer loses nothing.
        firsts = (FirstToken(first_token, logprobs=logprobs), *others)
        for choice, first in zip((sequence, *forks), firsts, strict=True):
            self._tell_first(choice, first)
        self.outbox(spec.router_id).flush()
        return receipt.bytes

    def _fork(self, sequence: Sequence, others: tuple[FirstToken, ...]) -> list[Sequence]:
        """Let a sequence's siblings run, where there are any; then each of them may have ended."""
        if not others:
            return []
        scheduler = self.context.engine.scheduler
        forks = scheduler.fork(sequence, (other.token_id for other in others))
        sequence.finish_reason = scheduler.finish_reason(sequence, sequence.token_ids[-1])
        if sequence.finish_reason:
            self.context.core.remove(sequence)
        return forks

    def _tell_first(self, sequence: Sequence, first: FirstToken) -> None:
        told = () if first.logprobs is None else (first.logprobs,)
        self._tell(sequence, (first.token_id,), sequence.finish_reason, told)
        if sequence.finish_reason:
            self._forget(_attempt(sequence), sequence.choice)

    def _keep(self, sequence: Sequence) -> None:
        choices = (sequence, *sequence.siblings)
        self._sequences[_attempt(sequence)] = {choice.choice: choice for choice in choices}
        for choice in choices:
            self._spans.begin(choice)

    def _end_local(self, sequence: Sequence) -> None:
        """Nobody waits for a prompt's first token any more."""
        if sequence in self._sequences.get(_attempt(sequence), {}).values():
            self.abort(_attempt(sequence))

    def abort(self, attempt: Attempt, choice: int | None = None) -> None:
        """End a request in whatever state it is, or one of its choices that runs; idempotent."""
        if choice is None:
            self.receiver.blocks.abort(attempt, self.clock())
            self.reserves.end(attempt, _aborted())
            self.local.ended(attempt, _aborted())
        for sequence in self._forget(attempt, choice):
            self.context.core.remove(sequence)
        self.context.core.schedule_steps()

    def abort_handoff(self, attempt: Attempt) -> None:
        """A writer gives up: its ticket ends, idempotent.

        A sequence that was committed runs on, since its writer may not know that it was: the
        router ends what runs.
        """
        self.receiver.blocks.abort(attempt, self.clock())
        self.reserves.end(attempt, _aborted())
        self._deadlines.pop(attempt, None)
        self.context.core.schedule_steps()

    def _forget(self, attempt: Attempt, choice: int | None = None) -> list[Sequence]:
        """A request, or one of its choices, is over. Returns what was kept of it."""
        choices = self._sequences.get(attempt, {})
        if choice is None:
            gone = list(choices.values())
            choices.clear()
        else:
            gone = [choices.pop(choice)] if choice in choices else []
        for sequence in gone:
            self._spans.end(sequence)
        self.reserves.serve_soon()
        if not choices:
            self._deadlines.pop(attempt, None)
            self._sequences.pop(attempt, None)
        return gone

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        """Pass a step's tokens on."""
        for update in updates:
            if update.token_ids:
                sequence = update.sequence
                self._tell(sequence, update.token_ids, sequence.finish_reason, update.logprobs)
                self.local.sampled(_attempt(sequence), update)
                if sequence.finish_reason:
                    self._forget(_attempt(sequence), sequence.choice)
        self._hand_back()
        self._flush()
        self.reserves.serve_soon()

    def _hand_back(self) -> None:
        """Tell of the sequences that have lost their blocks: behind all their tokens."""
        for sequence in self.context.engine.scheduler.take_handed_back():
            kept = self._sequences.get(_attempt(sequence), {})
            if sequence not in kept.values():
                continue
            self._forget(_attempt(sequence), sequence.choice)
            spec = sequence.spec
            output = TokenOutput(
                spec.request_id,
                spec.attempt,
                sequence.output_length,
                (),
                choice=sequence.choice,
                handed_back=True,
            )
            self.outbox(spec.router_id).put(output)

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        """The step of these sequences failed: they end with an error."""
        for sequence in sequences:
            self._fail(sequence, error)
        self._flush()

    def on_expire(self, sequences: list[Sequence]) -> None:
        """These sequences end with an error."""
        for sequence in sequences:
            self._fail(sequence, DeadlineExceeded("the request's deadline has passed"))
        self._flush()

    def _fail(self, sequence: Sequence, error: BatonError) -> None:
        spec = sequence.spec
        self._spans.end(sequence, error)
        for other in self._forget(_attempt(sequence)):
            if other is not sequence:
                self.context.engine.scheduler.remove(other)
        self.local.ended(_attempt(sequence), error)
        output = TokenOutput(
            spec.request_id,
            spec.attempt,
            sequence.output_length,
            (),
            error=error.message,
            error_code=error.code or "",
            choice=sequence.choice,
        )
        self.outbox(spec.router_id).put(output)

    def _tell(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        finish: FinishReason | None,
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        spec = sequence.spec
        output = TokenOutput(
            spec.request_id,
            spec.attempt,
            sequence.output_length - len(token_ids),
            token_ids,
            finish,
            choice=sequence.choice,
            logprobs=logprobs,
        )
        self.outbox(spec.router_id).put(output)

    def _flush(self) -> None:
        for outbox in self._outboxes.values():
            outbox.flush()

    async def heartbeat(self) -> None:
        """End what has expired. Raises WorkerFailed where the engine hangs."""
        now = time.monotonic()
        for attempt, deadline in list(self._deadlines.items()):
            if deadline <= now:
                self.abort(attempt)
        self._drop_lost_routers(self.clock())
        self._hand_back()
        self._flush()
        self.context.core.beat(now)
        self.reserves.heartbeat()

    def _drop_lost_routers(self, now: float) -> None:
        for router_id, outbox in list(self._outboxes.items()):
            if outbox.unread_for(now) < ROUTER_GRACE_S:
                continue
            log.info("router %s has gone: its sequences end", router_id)
            for attempt, choices in list(self._sequences.items()):
                if any(choice.spec.router_id == router_id for choice in choices.values()):
                    self.abort(attempt)
            del self._outboxes[router_id]

    async def close(self) -> None:
        """End every sequence and ticket."""
        self.closing = True
        for stream in list(self._streams):
            stream.end(_stopping())
        self.reserves.close(_stopping())
        self.receiver.blocks.close()
        stopping = WorkerFailed("the decode worker is stopping")
        for choices in list(self._sequences.values()):
            for sequence in list(choices.values()):
                self._fail(sequence, stopping)
                self.context.core.remove(sequence)
        self.local.close(stopping)
        self._prefills.close()
        self._flush()
        self._unsubscribe()
        self.receiver.close()


def _attempt(sequence: Sequence) -> Attempt:
    return sequence.spec.request_id, sequence.spec.attempt


def _aborted() -> TicketEnded:
    return TicketEnded("the request was aborted")


def _stopping() -> Unavailable:
    return Unavailable("this decode worker is stopping")
