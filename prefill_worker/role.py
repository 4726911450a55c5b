"""The prefill role: computes prompts, samples the first token, hands the sequence off."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from typing import Any
from weakref import WeakValueDictionary

import grpc.aio
from opentelemetry.trace import Span

from baton.config.choices import MIB
from baton.errors import BatonError, DeadlineExceeded, WorkerFailed
from baton.request import FinishReason, FirstToken, SequenceSpec
from baton.rpc import convert
from baton.telemetry.tracing import begin_span, context_of, fail_span
from baton.v1 import prefill_pb2, prefill_pb2_grpc
from engine.scheduling.sequence import Sequence, SequenceUpdate
from kvtransfer.transports.transport import Peer
from prefill_worker.handoff import Handoff
from worker.conversion.converted_blocks import Staging
from worker.fetch.fetch import Fetcher, PrefixSource, source_of
from worker.fetch.fetch_estimates import FetchEstimates
from worker.role import WorkerContext
from worker.services.beats import Beats
from worker.services.first_token import first_of, first_token
from worker.services.prefill_service import PrefillServicer

log = logging.getLogger(__name__)

Event = SequenceUpdate | BatonError

LOOK_S = 0.01
"""How often a running step is asked for the layers that it has stored, where that is worth it."""


class PrefillRole:
    """Implements ``worker.role.Role``. Owned by the control loop."""

    def __init__(self, context: WorkerContext, estimates: FetchEstimates | None = None) -> None:
        """``estimates`` say when cached blocks are fetched; new ones are made if it is absent."""
        self.context = context
        self._fetcher = Fetcher(context, estimates or FetchEstimates())
        self._listeners: dict[int, asyncio.Queue[Event]] = {}
        self._staging = Staging(context.settings.config.advanced.transfer_window_mib * MIB)
        self._service = PrefillServicer(
            self.run, context.core.load, Beats.of(context.settings.config)
        )
        self._places = asyncio.Semaphore(context.settings.pool.max_sequences)
        self._handoffs: WeakValueDictionary[Peer, asyncio.Semaphore] = WeakValueDictionary()
        """Bounds of handoffs by receiver, while any handoff to it is under way."""

    def mount(self, server: grpc.aio.Server) -> None:
        """Add PrefillService."""
        prefill_pb2_grpc.add_PrefillServiceServicer_to_server(self._service, server)

    async def run(
        self, request: prefill_pb2.PrefillRequest
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """``prefill`` of a message."""
        spec = convert.sequence_from_proto(request.sequence)
        address, incarnation = request.decode_address, request.decode_incarnation
        responses = self.prefill(spec, address, incarnation, source_of(request))
        async with aclosing(responses):
            async for response in responses:
                yield response

    async def prefill(
        self,
        spec: SequenceSpec,
        address: str,
        incarnation: str,
        source: PrefixSource | None = None,
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        """Compute, answer with the first token, hand off, answer again. Raises BatonError.

        ``source`` may be asked for blocks of the prompt, so that these are not computed.
        Closing the iterator aborts the request here and at the decode worker.
        """
        span = begin_span(
            "prefill", spec.trace, attributes={"baton.worker": self.context.settings.slot}
        )
        spec = replace(spec, trace=context_of(span, spec.trace))
        try:
            with self.context.intake.admitted():
                responses = self._prefill(spec, Peer(incarnation, address), source)
                async with aclosing(responses):
                    async for response in responses:
                        _note(span, response)
                        yield response
        except Exception as error:
            fail_span(span, error)
            raise
        finally:
            span.end()

    async def _prefill(
        self, spec: SequenceSpec, peer: Peer, source: PrefixSource | None
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        arrived = time.monotonic()
        deadline = arrived + spec.deadline_s
        self.context.check_prompt(spec)
        matcher = None
        if spec.sampling.grammar is not None:
            matcher = await self.context.grammars.ready(spec.sampling.grammar, deadline)
        sequence = self.context.make_sequence(
            spec, arrived=arrived, deadline=deadline, prefill_only=True
        )
        sequence.follow(matcher)
        if spec.sampling.max_tokens - (len(spec.token_ids) - spec.prompt_length) <= 1:
            async with aclosing(self._run(sequence, None, source, deadline)) as responses:
                async for response in responses:
                    yield response
            return
        handoff = Handoff(self.context, spec, peer, self._staging, deadline=deadline)
        async with (
            _taken(self._handoff_bound(peer), deadline),
            aclosing(self._run(sequence, handoff, source, deadline)) as responses,
        ):
            async for response in responses:
                yield response

    def _handoff_bound(self, peer: Peer) -> asyncio.Semaphore:
        """What bounds the handoffs to one receiver, waiting reserves included.

        Each receiver has a bound of its own: one without room holds up no prompt for another. And
        at most one batch of its blocks is promised before the prompts are computed.
        """
        bound = self._handoffs.get(peer)
        if bound is None:
            bound = asyncio.Semaphore(self.context.settings.pool.max_sequences)
            self._handoffs[peer] = bound
        return bound

    async def _run(
        self,
        sequence: Sequence,
        handoff: Handoff | None,
        source: PrefixSource | None,
        deadline: float,
    ) -> AsyncGenerator[prefill_pb2.PrefillResponse, None]:
        choices = (sequence, *sequence.siblings)
        place = AsyncExitStack()
        try:
            if handoff is not None:
                # No prompt is computed without blocks that wait for it, and no place is taken until
                # then: a prompt with a place waits for nothing else, so that places come free.
                await handoff.reserve()
                sequence.takes_prompt = not handoff.without_drafter
            await place.enter_async_context(_taken(self._places, deadline))
            if handoff is not None:
                # Its ticket may have ended while it waited for the place.
                handoff.check()
            blocks = await self._held_elsewhere(sequence, source, deadline)
            firsts = await self._compute(sequence, blocks, handoff, deadline)
            computed_at = time.monotonic()
            if handoff is None:
                # Whatever else it is, the first token is the last one.
                firsts = [
                    replace(first, finish_reason=first.finish_reason or FinishReason.LENGTH)
                    for first in firsts
                ]
            for choice, first in zip(choices, firsts, strict=True):
                yield first_token(choice, first, self.context.core.load())
            if handoff is not None and not all(first.finish_reason for first in firsts):
                pushed = await handoff.commit(
                    firsts[0].token_id, logprobs=firsts[0].logprobs, others=tuple(firsts[1:])
                )
                exposed_s = time.monotonic() - computed_at
                self.context.metrics.handoff_exposed_seconds.labels(handoff.transport).observe(
                    exposed_s
                )
                yield prefill_pb2.PrefillResponse(
                    handoff=prefill_pb2.HandoffCommitted(
                        bytes=pushed,
                        pinned_blocks=handoff.pinned_blocks,
                        transfer_ms=exposed_s * 1e3,
                    ),
                    load=convert.load_to_proto(self.context.core.load()),
                )
        finally:
            for choice in choices:
                self._listeners.pop(choice.sequence_id, None)
            await asyncio.shield(self._end(sequence, handoff, place))

    async def _held_elsewhere(
        self, sequence: Sequence, source: PrefixSource | None, deadline: float
    ) -> list[int]:
        """Leading blocks that came from a tier of this worker, or from another worker."""
        own: list[int] = []
        # What is scored is computed: such a block has no logits.
        if self.context.tiers is not None:
            own = await self.context.tiers.loader.load(sequence, deadline)
        if source is None or sequence.scores_prompt:
            return own
        try:
            fetched = await self._fetcher.fetch(sequence, source, deadline)
        except BaseException:
            self.context.engine.pool.release(own)
            raise
        if not fetched:
            return own
        # They begin with what is held here.
        self.context.engine.pool.release(own)
        return fetched

    async def _end(
        self, sequence: Sequence, handoff: Handoff | None, place: AsyncExitStack
    ) -> None:
        """Give back its blocks and its place once no reader of the blocks is left here."""
        if handoff is not None:
            await handoff.close()
        self.context.core.remove(sequence)
        await place.aclose()

    async def _compute(
        self, sequence: Sequence, blocks: list[int], handoff: Handoff | None, deadline: float
    ) -> list[FirstToken]:
        """Run the chunks after ``blocks``, pushing blocks as they fill.

        Returns the first token of each choice.
        """
        events: asyncio.Queue[Event] = asyncio.Queue()
        choices = (sequence, *sequence.siblings)
        for choice in choices:
            self._listeners[choice.sequence_id] = events
        firsts: list[FirstToken] = []
        # Nothing is awaited between the fetch and this: the blocks have an owner at all times.
        self.context.core.add(sequence, blocks)
        while True:
            event = await self._next_event(sequence, events, handoff, deadline)
            if isinstance(event, BatonError):
                raise event
            # With its first token all that it came with is computed.
            tokens = len(sequence.spec.token_ids) if event.token_ids else sequence.computed
            # A sequence that has ended has no blocks any more, and none is wanted.
            if handoff is not None and not firsts and sequence.block_table:
                handoff.computed(sequence.block_table, tokens)
            if event.token_ids:
                firsts.append(first_of(event))
            if len(firsts) == len(choices):
                return firsts

    async def _next_event(
        self,
        sequence: Sequence,
        events: asyncio.Queue[Event],
        handoff: Handoff | None,
        deadline: float,
    ) -> Event:
        get = asyncio.ensure_future(events.get())
        waits: set[asyncio.Future[Any]] = {get}
        if handoff is not None and handoff.sending is not None:
            waits.add(handoff.sending)
        looks = handoff is not None and handoff.sends_layers(self._next_tokens(sequence))
        try:
            while (left := deadline - time.monotonic()) > 0:
                pause = min(left, LOOK_S) if looks else left
                await asyncio.wait(waits, timeout=pause, return_when=asyncio.FIRST_COMPLETED)
                if get.done():
                    return get.result()
                if handoff is not None:
                    handoff.check()
                    self._push_layers(sequence, handoff)
        finally:
            get.cancel()
        raise _expired()

    def _next_tokens(self, sequence: Sequence) -> int:
        """The most that the next chunk has."""
        left = len(sequence.token_ids) - sequence.computed
        return min(left, self.context.engine.scheduler.limits.max_tokens(sequence.computed))

    def _push_layers(self, sequence: Sequence, handoff: Handoff) -> None:
        """Send what the running step has stored of the sequence so far, where that pays."""
        progress = self.context.core.progress(sequence)
        if progress is not None and progress.layers:
            size = self.context.engine.cache.block_size
            blocks = -(-progress.tokens // size) if progress.is_last else progress.tokens // size
            # One that was preempted meanwhile has no blocks.
            if blocks <= len(sequence.block_table):
                handoff.computing(sequence.block_table, blocks, progress.layers)

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        """Tell each sequence's call what has been computed."""
        for update in updates:
            listener = self._listeners.get(update.sequence.sequence_id)
            if listener is not None:
                listener.put_nowait(update)

    def on_fail(self, sequences: list[Sequence], error: BatonError) -> None:
        """The step of these sequences failed: their calls end with an error."""
        for sequence in sequences:
            listener = self._listeners.get(sequence.sequence_id)
            if listener is not None:
                listener.put_nowait(error)

    def on_expire(self, sequences: list[Sequence]) -> None:
        """Their calls end with an error."""
        for sequence in sequences:
            listener = self._listeners.get(sequence.sequence_id)
            if listener is not None:
                listener.put_nowait(_expired())

    async def heartbeat(self) -> None:
        """Plan again: blocks of tickets that ended, and blocks lent to readers, have come back.

        Raises WorkerFailed where the engine hangs.
        """
        self.context.core.beat(time.monotonic())

    async def close(self) -> None:
        """Prefills under way end with an error, then the routers' streams."""
        for listener in self._listeners.values():
            listener.put_nowait(WorkerFailed("the prefill worker is stopping"))
        self._service.close()


@asynccontextmanager
async def _taken(places: asyncio.Semaphore, deadline: float) -> AsyncIterator[None]:
    """Hold one of ``places``. ``deadline`` is in seconds of the monotonic clock.

    Raises DeadlineExceeded.
    """
    try:
        async with asyncio.timeout(max(0.0, deadline - time.monotonic())):
            await places.acquire()
    except TimeoutError:
        raise DeadlineExceeded("the request's deadline passed before its prefill") from None
    try:
        yield
    finally:
        places.release()


def _note(span: Span, response: prefill_pb2.PrefillResponse) -> None:
    """What the router is told, the trace is told too."""
    if not response.HasField("first_token") or not span.is_recording():
        return
    span.add_event("first token")
    span.set_attributes(
        {
            "baton.queue_ms": response.queue_ms,
            "baton.compute_ms": response.compute_ms,
            "baton.computed_prompt_tokens": response.computed_tokens,
            "baton.cached_prompt_tokens": response.cached_prompt_tokens,
        }
    )


def _expired() -> DeadlineExceeded:
    return DeadlineExceeded("the request's deadline passed during its prefill")
