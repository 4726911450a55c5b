"""One prompt on a worker, from the router's request to the first tokens and the handoff.

    arrived ─its grammar is compiled, its sink has room→ admitted ─cached blocks are there→ queued;
    queued ─steps→ computed ─first tokens are sent, the sink takes the sequence over→ ended;

    any ─cancelled, aborted, deadline, failure, the worker stops→ ended, at the sink too

Both roles run this flow with different sinks. A prefill worker hands the sequence to a decode
worker (``prefill_worker.role``). A decode worker keeps it (``decode_worker.local_prefill``). Owned
by the worker's event loop.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol

from opentelemetry.trace import Span

from baton.errors import DeadlineExceeded, TicketEnded
from baton.request import AttemptName, FirstToken, LoadSnapshot, SequenceSpec, TokenOutput
from baton.rpc import convert
from baton.telemetry.tracing import begin_span, context_of, fail_span
from baton.v1 import prefill_pb2
from engine.scheduling.sequence import Sequence, SequenceUpdate
from worker.prefill.fetch import Fetcher, PrefixSource, source_of
from worker.prefill.fetch_estimates import FetchEstimates
from worker.prefill.prompt_retention import claim_retention, held_tokens
from worker.prefill.service import Send
from worker.role import WorkerContext


class PromptUpdates:
    """Queue of the step results of one prompt. It also receives the error that ends the prompt
    early."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[SequenceUpdate | Exception] = asyncio.Queue()

    def put(self, update: SequenceUpdate | Exception) -> None:
        """Add a step's result for the prompt, or the error that ends the prompt."""
        self._queue.put_nowait(update)

    def check(self) -> None:
        """Raise the error that has ended the prompt before it was queued, if there is such an
        error."""
        if not self._queue.empty():
            _raised(self._queue.get_nowait())

    async def next(self, timeout_s: float) -> SequenceUpdate | None:
        """Wait for the result of the prompt's next step. Returns None if there is no result within
        ``timeout_s`` seconds.

        Raises the error that has ended the prompt.
        """
        try:
            async with asyncio.timeout(timeout_s):
                update = await self._queue.get()
        except TimeoutError:
            return None
        return _raised(update)


def _raised(update: SequenceUpdate | Exception) -> SequenceUpdate:
    if isinstance(update, Exception):
        raise update
    return update


class Sink(Protocol):
    """The place where a sequence continues after its first token: this worker or a decode worker.

    The methods are called in this order. ``close`` is called even if another method fails.
    """

    async def reserve(self, sequence: Sequence) -> float:
        """Check that there is room for the sequence where it continues, and wait for room on this
        worker.

        Returns the seconds that another worker took to answer. Raises NoRoom, BatonError.
        """

    async def compute(self, sequence: Sequence, blocks: list[int]) -> list[FirstToken]:
        """Queue the sequence, and return the first tokens of its choices. ``blocks`` hold the KV of
        the sequence's first tokens already.

        The sink owns ``blocks`` from now on. The result leaves out choices whose first token
        reaches the router in another way. Raises BatonError.
        """

    async def commit(self, firsts: list[FirstToken]) -> prefill_pb2.HandoffCommitted | None:
        """Let the sequence continue after its first tokens.

        Returns the message for the router about the handoff; None if there was no handoff.
        """

    async def close(self) -> None:
        """End the sequence if it was not committed, and release all resources of the sink. Never
        raises; idempotent."""


@dataclass(frozen=True, slots=True)
class PromptTimes:
    """Durations of one prompt on this worker, in seconds of its monotonic clock."""

    reserve_s: float = 0.0
    """Time to reserve room at the decode worker."""
    fetch_s: float = 0.0
    """Time to get cached blocks from offload tiers and other workers."""
    steps_s: float = 0.0
    """Time from the first step to the first token, including steps of other sequences."""


OpenSink = Callable[[SequenceSpec, prefill_pb2.PrefillRequest, PromptUpdates, float], Sink]
"""Makes the sink of a prompt. The last argument is the deadline, in seconds of the monotonic clock.

The sink takes no resources yet. Raises BatonError for a request that this worker does not serve.
"""


class PrefillFlow:
    """Runs the prompts that this worker computes, from the router's request to the handoff."""

    def __init__(
        self,
        context: WorkerContext,
        open_sink: OpenSink,
        *,
        prefill_only: bool,
        check: Callable[[prefill_pb2.PrefillRequest], None] = lambda _: None,
        estimates: FetchEstimates | None = None,
    ) -> None:
        """``prefill_only``: true if sequences end on this worker with their first token.

        ``check`` raises an error for a request that this worker refuses before its prompt is read.
        ``estimates`` decide when cached blocks are fetched from other workers. Without it, new ones
        are learned.
        """
        self._context = context
        self._open_sink = open_sink
        self._prefill_only = prefill_only
        self._check = check
        self._fetcher = Fetcher(context, estimates or FetchEstimates())
        self._updates: dict[AttemptName, PromptUpdates] = {}

    async def run(self, request: prefill_pb2.PrefillRequest, send: Send) -> None:
        """Compute a prompt, send its first tokens, hand the sequence over, and report that. Raises
        BatonError.

        If the task is cancelled, the request is aborted on this worker and at the sink.
        """
        arrived = time.monotonic()
        self._check(request)
        spec = convert.sequence_from_proto(request.sequence)
        with _span_of(spec, self._context.settings.slot) as span, self._context.intake.admitted():
            spec = replace(spec, trace=context_of(span, spec.trace))
            deadline = arrived + spec.deadline_s
            self._context.check_prompt(spec)
            attempt = (spec.request_id, spec.attempt)
            if attempt in self._updates:
                raise TicketEnded(
                    f"request {spec.request_id} attempt {spec.attempt} is already placed"
                )
            updates = PromptUpdates()
            sink = self._open_sink(spec, request, updates, deadline)
            self._updates[attempt] = updates
            try:
                matcher = None
                if spec.sampling.grammar is not None:
                    matcher = await self._context.grammars.ready(
                        spec.sampling.grammar, spec.cache_salt, deadline
                    )
                sequence = self._context.make_sequence(
                    spec, arrived=arrived, deadline=deadline, prefill_only=self._prefill_only
                )
                sequence.follow(matcher)
                retained = claim_retention(self._context, sequence, arrived)
                reserve_s = await sink.reserve(sequence)
                updates.check()
                source = source_of(request.source) if request.HasField("source") else None
                fetch_began = time.monotonic()
                blocks = await self._cached_blocks(sequence, source, updates, deadline)
                fetch_s = time.monotonic() - fetch_began
                # Siblings leave ``sequence.siblings`` once they have started, so take them now.
                choices = (sequence, *sequence.siblings)
                firsts = await sink.compute(sequence, blocks)
                steps_s = max(0.0, time.monotonic() - arrived - sequence.queue_s)
                times = PromptTimes(reserve_s, fetch_s, steps_s)
                _note(span, sequence, times)
                kept = held_tokens(self._context, retained)
                self._context.core.count_prompt(sequence)
                for choice, first in zip(choices, firsts, strict=False):
                    load = self._context.core.load()
                    send(first_token_response(choice, first, load, times, retained_tokens=kept))
                handoff = await sink.commit(firsts)
                if handoff is not None:
                    told = convert.load_to_proto(self._context.core.load())
                    send(prefill_pb2.PrefillResponse(handoff=handoff, load=told))
            finally:
                del self._updates[attempt]
                # A cancelled prompt must release its blocks and its room, too.
                await asyncio.shield(sink.close())

    async def _cached_blocks(
        self,
        sequence: Sequence,
        source: PrefixSource | None,
        updates: PromptUpdates,
        deadline: float,
    ) -> list[int]:
        """Get the first blocks of a prompt from a tier of this worker, or from another worker.

        The caller owns the returned blocks. Returns an empty list if the prompt's own logprobs are
        wanted, because cached blocks have no logits. Raises the error that has ended the prompt
        meanwhile.
        """
        context = self._context
        blocks: list[int] = []
        if context.tiers is not None:
            blocks = await context.tiers.loader.load(sequence, deadline)
        try:
            if source is not None and not sequence.scores_prompt:
                fetched = await self._fetcher.fetch(sequence, source, deadline)
                if fetched:
                    # The fetched blocks include those that are here already.
                    context.engine.pool.release(blocks)
                    blocks = fetched
            updates.check()
        except BaseException:
            context.engine.pool.release(blocks)
            raise
        return blocks

    def on_emit(self, updates: list[SequenceUpdate]) -> None:
        """Pass a step's results to the tasks that wait for them, one for each prompt."""
        if not self._updates:
            return
        for update in updates:
            waiting = self._updates.get(attempt_of(update.sequence))
            if waiting is not None:
                waiting.put(update)

    def end(self, attempt: AttemptName, error: Exception) -> None:
        """End a prompt early with ``error``, if its task waits for results of steps."""
        waiting = self._updates.get(attempt)
        if waiting is not None:
            waiting.put(error)

    def close(self, error: Exception) -> None:
        """End all prompts whose tasks wait for results of steps, with ``error``."""
        for waiting in self._updates.values():
            waiting.put(error)


def attempt_of(sequence: Sequence) -> AttemptName:
    """Return the id of a sequence's request, and the number of the request's attempt."""
    return sequence.spec.request_id, sequence.spec.attempt


def first_of(update: SequenceUpdate) -> FirstToken:
    """Return the first token of a choice. ``update`` is the step result that contains it."""
    logprobs = update.logprobs[0] if update.logprobs else None
    return FirstToken(update.token_ids[0], update.finish_reason, logprobs)


def first_token_response(
    sequence: Sequence,
    first: FirstToken,
    load: LoadSnapshot,
    times: PromptTimes,
    *,
    retained_tokens: int = 0,
) -> prefill_pb2.PrefillResponse:
    """Make the response to the router that reports the first token of one choice.

    Only the response for the first choice carries the cost and the times of the prompt, its
    logprobs, its embedding, and the number of retained tokens.
    """
    spec = sequence.spec
    output = TokenOutput(
        spec.request_id,
        spec.attempt,
        len(spec.token_ids) - spec.prompt_length,
        (first.token_id,),
        first.finish_reason,
        choice=sequence.choice,
        logprobs=(first.logprobs,) if first.logprobs is not None else (),
        prompt_logprobs=tuple(sequence.prompt_logprobs),
        embedding=sequence.embedding,
    )
    response = prefill_pb2.PrefillResponse(
        first_token=convert.output_to_proto(output), load=convert.load_to_proto(load)
    )
    if sequence.choice == spec.choice:
        response.cached_prompt_tokens = min(sequence.cached_tokens, spec.prompt_length)
        response.retained_prompt_tokens = retained_tokens
        response.queue_ms = sequence.queue_s * 1e3
        response.compute_ms = sequence.compute_s * 1e3
        response.computed_tokens = sequence.computed_here
        response.reserve_ms = times.reserve_s * 1e3
        response.fetch_ms = times.fetch_s * 1e3
        response.steps_ms = times.steps_s * 1e3
    return response


def deadline_passed() -> DeadlineExceeded:
    """Return the error of a prompt whose deadline passes before its first token."""
    return DeadlineExceeded("the request's deadline passed during its prefill")


@contextmanager
def _span_of(spec: SequenceSpec, worker: str) -> Iterator[Span]:
    span = begin_span("prefill", spec.trace, attributes={"baton.worker": worker})
    try:
        yield span
    except Exception as error:
        fail_span(span, error)
        raise
    finally:
        span.end()


def _note(span: Span, sequence: Sequence, times: PromptTimes) -> None:
    """Add the cost of the sequence's prompt to its trace span."""
    if not span.is_recording():
        return
    span.add_event("first token")
    span.set_attributes(
        {
            "baton.queue_ms": sequence.queue_s * 1e3,
            "baton.reserve_ms": times.reserve_s * 1e3,
            "baton.fetch_ms": times.fetch_s * 1e3,
            "baton.steps_ms": times.steps_s * 1e3,
            "baton.compute_ms": sequence.compute_s * 1e3,
            "baton.computed_prompt_tokens": sequence.computed_here,
            "baton.cached_prompt_tokens": min(sequence.cached_tokens, sequence.spec.prompt_length),
        }
    )
