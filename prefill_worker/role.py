"""The prefill role: computes prompts, and hands their sequences to decode workers."""

from __future__ import annotations

import asyncio
import time
from contextlib import ExitStack
from dataclasses import replace
from weakref import WeakValueDictionary

import grpc.aio

from baton.config.choices import MIB
from baton.errors import BatonError, DeadlineExceeded, WorkerFailed
from baton.request import FinishReason, FirstToken, SequenceSpec
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from engine.scheduling.sequence import Sequence, SequenceUpdate
from kvtransfer.transports.transport import Peer
from prefill_worker.handoff import Handoff
from worker.conversion.converted_blocks import Staging
from worker.prefill.fetch_estimates import FetchEstimates
from worker.prefill.flow import (
    PrefillFlow,
    PromptUpdates,
    attempt_of,
    deadline_passed,
    first_of,
)
from worker.prefill.service import PrefillServicer
from worker.role import WorkerContext
from worker.services import Keepalive

LAYER_POLL_S = 0.01
"""Seconds between two checks whether the running step has stored more layers."""


class PrefillRole:
    """The prefill role of a worker. Implements ``worker.role.Role``. Owned by the worker's event
    loop."""

    def __init__(self, context: WorkerContext, estimates: FetchEstimates | None = None) -> None:
        """``estimates`` decide when cached blocks are fetched from other workers. Without it, new
        ones are learned."""
        self.context = context
        self.flow = PrefillFlow(context, self._open, prefill_only=True, estimates=estimates)
        self._service = PrefillServicer(
            self.flow.run, context.core.load, Keepalive.of(context.settings.config)
        )
        self._staging = Staging(context.settings.config.advanced.transfer_window_mib * MIB)
        self._places = asyncio.Semaphore(context.settings.pool.max_sequences)
        self._handoffs: WeakValueDictionary[Peer, asyncio.Semaphore] = WeakValueDictionary()
        """Semaphores that bound the handoffs to each receiver. A semaphore is dropped when no
        handoff to its receiver is in flight."""

    def mount(self, server: grpc.aio.Server) -> None:
        """Add PrefillService to the server."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._service, server)

    def _open(
        self,
        spec: SequenceSpec,
        request: prefill_pb2.PrefillRequest,
        updates: PromptUpdates,
        deadline: float,
    ) -> RemoteSink:
        peer = Peer(request.decode_incarnation, request.decode_address)
        handoff = None
        if spec.sampling.max_tokens - (len(spec.token_ids) - spec.prompt_length) > 1:
            handoff = Handoff(
                self.context, spec, peer, self._staging, deadline=deadline, on_broken=updates.put
            )
        bound = None if handoff is None else self._handoff_bound(peer)
        return RemoteSink(self.context, handoff, bound, self._places, updates, deadline)

    def _handoff_bound(self, peer: Peer) -> asyncio.Semaphore:
        """Return the semaphore that bounds the handoffs to one receiver. Handoffs that still wait
        for their reserve count, too.

        Each receiver has its own semaphore, so a full receiver does not delay prompts for other
        receivers. The semaphore also limits the blocks that a receiver reserves before their
        prompts are computed: to those of one batch.
        """
        bound = self._handoffs.get(peer)
        if bound is None:
            bound = asyncio.Semaphore(self.context.settings.pool.max_sequences)
            self._handoffs[peer] = bound
        return bound

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        """Pass a step's results to the tasks that wait for them, one for each prompt."""
        self.flow.on_emit(updates)

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        """End the prompts of these sequences with the error of their failed step."""
        for sequence in sequences:
            self.flow.end(attempt_of(sequence), error)

    def on_expire(self, sequences: list[Sequence]) -> None:
        """End the prompts of these sequences: their deadline has passed."""
        for sequence in sequences:
            self.flow.end(attempt_of(sequence), deadline_passed())

    async def heartbeat(self) -> None:
        """Schedule steps again, because blocks may be free: expired tickets and other workers'
        reads release blocks without a notice.

        Raises WorkerFailed if the engine hangs.
        """
        self.context.core.beat(time.monotonic())

    async def close(self) -> None:
        """End prefills in flight with an error, then the streams of their routers."""
        self.flow.close(WorkerFailed("the prefill worker is stopping"))
        self._service.close()


class RemoteSink:
    """Implements ``worker.prefill.flow.Sink``: the sequence continues on a decode worker.

    If the first token is also the last, there is no handoff.
    """

    def __init__(
        self,
        context: WorkerContext,
        handoff: Handoff | None,
        bound: asyncio.Semaphore | None,
        places: asyncio.Semaphore,
        updates: PromptUpdates,
        deadline: float,
    ) -> None:
        """``bound`` limits the number of handoffs to the receiver. ``places`` limits the number of
        prompts in this worker's batch."""
        self._context = context
        self._handoff = handoff
        self._bound = bound
        self._places = places
        self._updates = updates
        self._deadline = deadline
        self._sequence: Sequence | None = None
        self._taken = ExitStack()

    async def reserve(self, sequence: Sequence) -> float:
        """Get a ticket from the receiver, then a place in this worker's batch. Returns the seconds
        until the ticket was there. Raises BatonError.

        The ticket comes first, so no prompt is computed before the receiver has blocks for it. A
        prompt that holds a place waits for nothing else, so its place always becomes free again.
        """
        self._sequence = sequence
        began = time.monotonic()
        if self._handoff is not None and self._bound is not None:
            await self._take(self._bound)
            await self._handoff.reserve()
            sequence.takes_prompt = not self._handoff.without_drafter
        reserve_s = time.monotonic() - began
        await self._take(self._places)
        return reserve_s

    async def _take(self, places: asyncio.Semaphore) -> None:
        """Take one place from the semaphore ``places``, and hold it until the sink is closed.
        Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(max(0.0, self._deadline - time.monotonic())):
                await places.acquire()
        except TimeoutError:
            raise DeadlineExceeded("the request's deadline passed before its prefill") from None
        self._taken.callback(places.release)

    async def compute(self, sequence: Sequence, blocks: list[int]) -> list[FirstToken]:
        """Compute the rest of the prompt after its cached ``blocks``. Push each block to the
        receiver when it is full.

        Returns the first token of each choice.
        """
        handoff, firsts = self._handoff, list[FirstToken]()
        # Siblings leave ``sequence.siblings`` once they have started, so count them now.
        choices = 1 + len(sequence.siblings)
        self._context.core.add(sequence, blocks)
        while len(firsts) < choices:
            update = await self._next_update(sequence)
            # Once the first token is there, the whole prompt is computed.
            tokens = len(sequence.spec.token_ids) if update.token_ids else sequence.computed
            # A sequence that has ended has no blocks any more, and the receiver needs none.
            if handoff is not None and not firsts and sequence.block_table:
                handoff.computed(sequence.block_table, tokens)
            if update.token_ids:
                firsts.append(first_of(update))
        if handoff is None:
            # Without a handoff, the first token is also the last one.
            firsts = [
                replace(first, finish_reason=first.finish_reason or FinishReason.LENGTH)
                for first in firsts
            ]
        return firsts

    async def _next_update(self, sequence: Sequence) -> SequenceUpdate:
        """Wait for the result of the sequence's next step, and meanwhile push layers that the step
        has stored."""
        handoff = self._handoff
        if handoff is not None and not handoff.sends_layers(self._next_tokens(sequence)):
            handoff = None
        while (left := self._deadline - time.monotonic()) > 0:
            update = await self._updates.next(left if handoff is None else min(left, LAYER_POLL_S))
            if update is not None:
                return update
            if handoff is not None:
                self._push_layers(sequence, handoff)
        raise deadline_passed()

    def _next_tokens(self, sequence: Sequence) -> int:
        """Return the maximum number of the sequence's tokens in the next step."""
        left = len(sequence.token_ids) - sequence.computed
        return min(left, self._context.engine.scheduler.limits.max_tokens(sequence.computed))

    def _push_layers(self, sequence: Sequence, handoff: Handoff) -> None:
        """Push the layers of the sequence that the running step has stored so far, if an early push
        saves time."""
        progress = self._context.core.progress(sequence)
        if progress is not None and progress.layers:
            size = self._context.engine.cache.block_size
            blocks = -(-progress.tokens // size) if progress.is_last else progress.tokens // size
            # A sequence that was preempted meanwhile has no blocks.
            if blocks <= len(sequence.block_table):
                handoff.computing(sequence.block_table, blocks, progress.layers)

    async def commit(self, firsts: list[FirstToken]) -> prefill_pb2.HandoffCommitted | None:
        """Ask the receiver to run the sequence, unless the sequence ended with its first token.
        Raises BatonError."""
        handoff = self._handoff
        if handoff is None or all(first.finish_reason for first in firsts):
            return None
        computed_at = time.monotonic()
        pushed = await handoff.commit(firsts)
        exposed_s = time.monotonic() - computed_at
        self._context.metrics.handoff_exposed_seconds.labels(handoff.transport).observe(exposed_s)
        return prefill_pb2.HandoffCommitted(
            bytes=pushed, pinned_blocks=handoff.pinned_blocks, transfer_ms=exposed_s * 1e3
        )

    async def close(self) -> None:
        """Release the sequence's blocks and its place in the batch, once nothing on this worker
        reads the blocks."""
        if self._handoff is not None:
            await self._handoff.close()
        if self._sequence is not None:
            self._context.core.remove(self._sequence)
        self._taken.close()
