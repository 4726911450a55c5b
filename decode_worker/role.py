"""The decode role: takes handoffs in, batches continuously, streams tokens to the routers."""

from __future__ import annotations

import logging
import time

import grpc.aio

from baton.request import FinishReason, TokenOutput
from baton.v1 import decode_pb2_grpc, transfer_pb2_grpc
from decode_worker.outbox import Outbox
from decode_worker.receiver import HandoffReceiver, Offer
from decode_worker.service import DecodeServicer
from engine.scheduler import SequenceUpdate
from engine.sequence import Sequence
from kvtransfer.grpc_transport import TransferServicer
from kvtransfer.ticket import Attempt, Ticket
from worker.role import WorkerContext

log = logging.getLogger(__name__)

ROUTER_GRACE_S = 5.0
"""Sequences of a router that has had no stream open for this long are ended."""


class DecodeRole:
    """Implements ``worker.role.Role``. Owned by the control loop."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context
        self.receiver = HandoffReceiver(
            context.engine.scheduler,
            context.metrics,
            fingerprint=context.engine.fingerprint,
            geometry=context.engine.cache.geometry(),
            incarnation=context.incarnation,
            block_bytes=context.memory.block_bytes,
            lease_s=context.settings.config.lease_s,
        )
        self.closing = False
        self._outboxes: dict[str, Outbox] = {}
        self._sequences: dict[Attempt, Sequence] = {}
        self._deadlines: dict[Attempt, float] = {}

    def mount(self, server: grpc.aio.Server) -> None:
        """Add DecodeService and TransferService."""
        decode_pb2_grpc.add_DecodeServiceServicer_to_server(DecodeServicer(self), server)
        transfer_pb2_grpc.add_TransferServiceServicer_to_server(
            TransferServicer(self.receiver, self.context.memory, self.context.transfers), server
        )

    def outbox(self, router_id: str) -> Outbox:
        """A router's outbox, made when it is first needed."""
        if router_id not in self._outboxes:
            self._outboxes[router_id] = Outbox(time.monotonic())
        return self._outboxes[router_id]

    def reserve(self, offer: Offer) -> Ticket:
        """See ``HandoffReceiver.reserve``."""
        ticket = self.receiver.reserve(offer, time.monotonic())
        self._deadlines[ticket.attempt] = time.monotonic() + offer.spec.deadline_s
        self.context.control.pump()
        return ticket

    def commit(self, ticket_id: str, writer: str, first_token: int) -> int:
        """Join a handed-off sequence to the batch. Returns the bytes that crossed the wire."""
        receipt = self.receiver.commit(ticket_id, writer, time.monotonic())
        spec = receipt.spec
        sequence = self.context.make_sequence(spec)
        sequence.token_ids.append(first_token)
        self._sequences[(spec.request_id, spec.attempt)] = sequence
        # Told again: a prefill worker that dies before its answer loses nothing.
        self._tell(sequence, (first_token,), None)
        self.outbox(spec.router_id).flush()
        self.context.control.add_computed(sequence, receipt.blocks, len(spec.token_ids))
        return receipt.bytes

    def abort(self, attempt: Attempt) -> None:
        """End a request in whatever state it is; idempotent."""
        self.receiver.abort(attempt, time.monotonic())
        sequence = self._forget(attempt)
        if sequence is not None:
            self.context.control.remove(sequence)
        self.context.control.pump()

    def abort_handoff(self, attempt: Attempt) -> None:
        """A writer gives up: its ticket ends, idempotent.

        A sequence that was committed runs on, since its writer may not know that it was: the
        router ends what runs.
        """
        self.receiver.abort(attempt, time.monotonic())
        if attempt not in self._sequences:
            self._deadlines.pop(attempt, None)
        self.context.control.pump()

    def _forget(self, attempt: Attempt) -> Sequence | None:
        self._deadlines.pop(attempt, None)
        return self._sequences.pop(attempt, None)

    def on_step(self, updates: list[SequenceUpdate]) -> None:
        """Pass a step's tokens on."""
        for update in updates:
            if update.token_ids:
                sequence = update.sequence
                self._tell(sequence, update.token_ids, sequence.finish_reason)
                if sequence.finish_reason:
                    self._forget((sequence.spec.request_id, sequence.spec.attempt))
        self._flush()

    def on_lost(self, sequences: list[Sequence], error: Exception) -> None:
        """The engine failed: these sequences end with an error."""
        for sequence in sequences:
            self._fail(sequence, f"the decode worker's engine failed: {type(error).__name__}")
        self._flush()

    def _fail(self, sequence: Sequence, reason: str) -> None:
        spec = sequence.spec
        self._forget((spec.request_id, spec.attempt))
        index = sequence.output_length
        self.outbox(spec.router_id).put(
            TokenOutput(spec.request_id, spec.attempt, index, (), error=reason)
        )

    def _tell(
        self, sequence: Sequence, token_ids: tuple[int, ...], finish: FinishReason | None
    ) -> None:
        spec = sequence.spec
        index = sequence.output_length - len(token_ids)
        output = TokenOutput(spec.request_id, spec.attempt, index, token_ids, finish)
        self.outbox(spec.router_id).put(output)

    def _flush(self) -> None:
        for outbox in self._outboxes.values():
            outbox.flush()

    async def heartbeat(self) -> None:
        """End what has expired, and check that nothing is lost when nothing runs."""
        now = time.monotonic()
        self.receiver.sweep(now)
        for attempt, deadline in list(self._deadlines.items()):
            if deadline <= now:
                sequence = self._sequences.get(attempt)
                self.abort(attempt)
                if sequence is not None:
                    self._fail(sequence, "the request's deadline has passed")
        self._drop_lost_routers(now)
        self._flush()
        self.context.control.pump()
        if self.context.control.scheduler.is_idle() and not len(self.receiver.book):
            counts = self.context.engine.pool.counts()
            assert counts.used == counts.quarantined == 0, f"blocks leaked: {counts}"

    def _drop_lost_routers(self, now: float) -> None:
        for router_id, outbox in list(self._outboxes.items()):
            if outbox.unread_for(now) < ROUTER_GRACE_S:
                continue
            log.info("router %s has gone: its sequences end", router_id)
            for attempt, sequence in list(self._sequences.items()):
                if sequence.spec.router_id == router_id:
                    self.abort(attempt)
            del self._outboxes[router_id]

    async def close(self) -> None:
        """End every sequence and ticket."""
        self.closing = True
        self.receiver.close()
        for sequence in list(self._sequences.values()):
            self._fail(sequence, "the decode worker is stopping")
            self.context.control.remove(sequence)
        self._flush()
