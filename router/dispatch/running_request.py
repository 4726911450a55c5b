"""A request and its attempts, from admission to its end: the state between workers and client.

    placed ─first token→ streaming ─finish reason, stop string→ finished
    placed, streaming ─moved→ placed, with the tokens that it has
    placed, streaming ─failure→ failed

Tokens of older attempts are dropped, duplicates are skipped, and early tokens are kept until their
turn. Choices start in one attempt, and migrate one by one. Output that the client has not read is
merged into one delta, of a whole answer at most.

Shared by the dispatcher, placement and failover; owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain
from typing import Any

from opentelemetry.trace import Span

from baton.errors import BatonError, DeadlineExceeded
from baton.hashing import HashChain
from baton.host.background import spawn
from baton.logprobs import TokenLogprobs
from baton.request import (
    LOWEST_PRIORITY,
    AttemptName,
    Retention,
    SequenceSpec,
    TokenOutput,
    TraceContext,
)
from baton.rpc.grpc_errors import error_from_code
from baton.store.registry import WorkerRecord
from router.core.request import GenerationRequest, OutputDelta, Relay, without_answer
from router.core.timeline import AttemptRecord
from router.dispatch.deliveries import Deliveries
from router.dispatch.retry_limits import FailedWorkers
from router.routing.room import HeldRoom
from router.routing.routing_state import Promise
from router.text.output_processor import OutputProcessor
from router.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)

_PART = 64


class RunningRequest:
    """A running request with its choices and its current attempts."""

    def __init__(
        self,
        request: GenerationRequest,
        new_processor: Callable[[], OutputProcessor],
        deadline: float,
    ) -> None:
        """Create a running request. ``new_processor`` makes the processor of a choice's output.
        ``deadline`` is on the monotonic clock.
        """
        self.request = request
        self.deadline = deadline
        self._new_processor = new_processor
        self.choices = [RunningChoice(number, new_processor()) for number in range(request.choices)]
        self.several = len(self.choices) > 1
        """Whether the request has more than one choice."""
        self.awaits_prompt = request.awaits_prompt
        """Whether deltas are held back until the prompt's log probabilities or embedding have
        arrived."""
        self.attempts: set[Attempt] = set()
        """The current attempts of the request."""
        self.next_attempt = 0
        self.has_migrated = False
        """Whether an attempt was a migration."""
        self.excluded: set[str] = set()
        """Incarnations of workers that have failed while they had the request."""
        self.failures = 0
        """Number of migrations of the request that were caused by failures."""
        self.chains: defaultdict[int, defaultdict[str, HashChain]]
        """Block hashes of each choice that has been placed, by fingerprint."""
        self.chains = defaultdict(partial(defaultdict, HashChain))
        self.is_cache_counted = False
        """Whether the prompt's cache hits have been counted for the request, so that later attempts
        add none."""
        self.cached_tokens = 0
        """Number of the prompt's tokens that were cached before the first attempt, as far as
        routing knows. A later attempt also hits blocks that an earlier one has computed."""
        self.moves: set[asyncio.Task[None]] = set()
        """Tasks that place choices of the request again."""
        self._prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._embedding: tuple[float, ...] = ()
        self._written_tokens = 0
        self._error: BatonError | None = None
        self._changed = asyncio.Event()
        self._is_parked = False
        """Whether the reader waits in ``next_delta``, and was not woken yet."""
        self._relay: Relay | None = None
        self._deliveries: Deliveries | None = None
        self._is_due = False
        """Whether ``deliver`` is going to be called."""
        self._relay_error: Exception | None = None

    @cached_property
    def failed_workers(self) -> FailedWorkers:
        """The workers that have failed while they ran this request. The object is created on first
        use."""
        return FailedWorkers()

    # Input of placement

    def groups(self, choices: Iterable[int]) -> list[tuple[int, ...]]:
        """Split choices into groups that are placed together.

        Adjacent choices without tokens form one group, so that their prompt is computed once.
        Otherwise each choice is a sequence of its own.
        """
        numbers = sorted(choices)
        together = numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else False
        if together and not any(self.choices[n].token_ids for n in numbers):
            return [tuple(numbers)]
        return [(number,) for number in numbers]

    def token_ids(self, choice: int) -> tuple[int, ...]:
        """Return the token ids of the prompt and of all accepted tokens of a choice."""
        return self.request.prompt_ids + tuple(self.choices[choice].token_ids)

    def left_s(self, now: float) -> float:
        """Return the seconds until the request's deadline. Raises DeadlineExceeded if it has
        passed."""
        left_s = self.deadline - now
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed while it waited")
        return left_s

    def begin_again(self, choice: int) -> None:
        """Forget all output of a choice, so that an attempt computes its prompt again.

        Nothing of the choice was read: the request waits for its prompt's part of the answer."""
        assert self.awaits_prompt, "output may have been read"
        self.choices[choice] = RunningChoice(choice, self._new_processor())

    def sequence_spec(
        self,
        router_id: str,
        choices: tuple[int, ...],
        context_class: str,
        left_s: float,
        trace: TraceContext,
        *,
        scored: bool,
        retentions: tuple[Retention, ...] = (),
        cache_ttl_s: float = 0.0,
        output_number: int = 0,
    ) -> SequenceSpec:
        """Build the message for workers about choices that are placed together in the next attempt.

        ``scored``: true if the worker must compute the prompt's log probabilities, provided that
        they are requested. ``retentions``: retentions in addition to the request's own.
        ``output_number``: see ``SequenceSpec``."""
        request, sampling = self.request, self.request.sampling
        return SequenceSpec(
            request_id=request.request_id,
            attempt=self.next_attempt,
            router_id=router_id,
            token_ids=self.token_ids(choices[0]),
            prompt_length=len(request.prompt_ids),
            sampling=replace(sampling, prompt_logprobs=None)
            if sampling.prompt_logprobs is not None and not scored
            else sampling,
            cache_salt=request.block_salt,
            context_class=context_class,
            principal=request.principal,
            deadline_s=left_s,
            choices=len(choices),
            choice=choices[0],
            priority=LOWEST_PRIORITY if request.background else request.priority,
            preemptions=max(self.choices[n].preemptions for n in choices),
            hand_back=True,
            embeds=request.embeds,
            retentions=(*request.retentions, *retentions),
            cache_ttl_s=cache_ttl_s,
            trace=trace,
            reasoning=request.reasoning_span,
            without_speculation=request.without_speculation,
            output_number=output_number,
        )

    def move(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in a task. It places choices of the request again. If it raises an error,
        the request fails."""
        task = asyncio.create_task(self._move(work), name="move")
        self.moves.add(task)

        def forget(_: asyncio.Task[None]) -> None:
            self.moves.discard(task)
            # A task that is cancelled before it begins has not awaited the work.
            work.close()

        task.add_done_callback(forget)

    async def _move(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BatonError as error:
            self.fail(error)
        except Exception as error:
            log.exception("request %s could not be migrated", self.request.request_id)
            self.fail(BatonError(f"internal error: {type(error).__name__}"))

    # What workers report

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found in any choice, so that the worker must end the choice's
        sequence."""
        return any(choice.processor.stopped for choice in self.choices)

    @property
    def finished(self) -> bool:
        """Whether the client has read the last delta of every choice."""
        return all(choice.is_over for choice in self.choices)

    def accept(
        self,
        output: TokenOutput,
        *,
        cached_prompt_tokens: int = 0,
        written_prompt_tokens: int = 0,
        batch_size: float = 0.0,
    ) -> None:
        """Process the output of a worker for this request. ``batch_size``: the mean batch size of
        the worker's latest decode steps."""
        if output.choice >= len(self.choices):
            return
        choice = self.choices[output.choice]
        if output.attempt != choice.attempt:
            return
        self._written_tokens += written_prompt_tokens
        if output.error:
            self.fail(error_from_code(output.error_code or "worker_failed", output.error))
            return
        self.request.binding.bind()
        if self.awaits_prompt and (output.prompt_logprobs or output.embedding):
            self.awaits_prompt = False
            self._prompt_logprobs = output.prompt_logprobs
            self._embedding = output.embedding
        choice.batch_size = batch_size
        choice.accept(output, cached_prompt_tokens)
        if choice.unread and not self.awaits_prompt:
            self._wake()

    def accept_tokens(
        self, number: int, attempt: int, index: int, token_ids: tuple[int, ...]
    ) -> None:
        """Process tokens of the choice ``number`` that a worker has sent without anything else.
        ``index``: the output index of the first one."""
        choice = self.choices[number]
        if attempt != choice.attempt:
            return
        self.request.binding.bind()
        goes_on = choice.accept_tokens(index, token_ids)
        if not choice.unread or self.awaits_prompt:
            return
        if self._deliveries is None or not (goes_on and self._is_parked):
            self._wake()
        elif not self._is_due:
            self._is_due = True
            self._deliveries.add(self)

    def _wake(self) -> None:
        """Let the reader take the output that is unread, or the error."""
        self._is_parked = False
        self._changed.set()

    def take_stopped(self) -> list[int]:
        """Return the choices that the worker still runs although a stop string was found in them.
        Each choice is returned only once."""
        return [choice.number for choice in self.choices if choice.take_stopped()]

    def fail(self, error: BatonError) -> None:
        """End the request with an error, unless its whole answer has already arrived."""
        is_there = all(choice.processor.finished for choice in self.choices)
        if self._error is None and (self.awaits_prompt or not is_there):
            self._error = error
            self._wake()

    # What the client reads

    def relay_through(self, deliveries: Deliveries, relay: Relay) -> None:
        """Pass further deltas to ``relay`` while the reader waits for the next one. The last delta
        of a choice, and those that ``relay`` refuses, still go to the reader."""
        self._relay, self._deliveries = relay, deliveries

    def deliver(self) -> None:
        """Pass the unread output to the relay, unless the reader is going to take it."""
        self._is_due = False
        if not self._is_parked:
            return
        assert self._relay is not None, "deliveries come with a relay"
        try:
            for choice in self.choices:
                if choice.unread and not self._relay(delta := choice.take()):
                    choice.unread = [delta]
                    self._wake()
                    return
        except Exception as error:
            self._relay_error = error
            self._wake()

    async def next_delta(self) -> OutputDelta:
        """Wait for output of any choice, and return all unread output of that choice in one delta.
        Raises BatonError.
        """
        self._is_parked = not self._changed.is_set()
        try:
            await self._changed.wait()
        finally:
            self._is_parked = False
        if self._relay_error is not None:
            raise self._relay_error
        choice = None if self.awaits_prompt else self._waiting()
        if choice is None:
            assert self._error is not None, "woken for nothing"
            raise self._error
        delta = choice.take()
        if self._prompt_logprobs:
            delta.prompt_logprobs = self._prompt_logprobs
            self._prompt_logprobs = ()
        if self._embedding:
            delta.embedding = self._embedding
            self._embedding = ()
        if self._written_tokens:
            delta.written_prompt_tokens = self._written_tokens
            self._written_tokens = 0
        if self._error is None and not (self.several and self._waiting()):
            self._changed.clear()
        no_answer = self.request.embeds or self.request.prompt_only
        return without_answer(delta) if no_answer else delta

    def _waiting(self) -> RunningChoice | None:
        """Return the first choice with unread output."""
        for choice in self.choices:
            if choice.unread:
                return choice
        return None


@dataclass(eq=False, slots=True)
class Attempt:
    """Some choices of a request, placed at a prefill and a decode worker."""

    owner: RunningRequest
    spec: SequenceSpec
    source: WorkerLink
    """Link to the worker that computes the prompt."""
    target: WorkerLink
    """Link to the decode worker. This is the same object as ``source`` if the decode worker
    computes the prompt."""
    promise: Promise
    span: Span
    """Trace span from placement to the attempt's end."""
    begun_at: float
    """Start of the attempt, on the monotonic clock."""
    choices: set[int]
    """Numbers of the choices that have not been handed back."""
    record: AttemptRecord
    """The attempt in the request's timeline."""
    messages_before: int
    """Number of messages that the prefill worker's stream had received when the attempt began."""
    decode_began: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the decode worker has sent a token, which proves that the handoff was committed."""
    prefill: asyncio.Task[None] | None = None
    """Task that follows the attempt's prefill; None after the task has ended."""
    failed: bool = False
    """Whether the decode worker has reported a failure of the attempt, or has refused it. If so, no
    choice needs to be aborted there."""
    granted: HeldRoom | None = None
    """Room that the decode worker holds for the attempt, if the grant arrives before the
    refusal."""
    is_accepted: bool = False
    """Whether the decode worker is known to have room for the attempt."""
    withheld: TokenOutput | None = None
    """First token that the decode worker has sent, and that is left to the message on the prefill
    stream."""
    is_prefill_over: bool = False
    """Whether the worker that computes the prompt sends nothing more about it."""

    @property
    def name(self) -> AttemptName:
        """The name by which workers know the attempt."""
        return self.spec.request_id, self.spec.attempt

    def follow(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` in a task. It receives the worker's messages about the attempt's prefill."""
        self.prefill = spawn(work, f"prefill {self.spec.request_id}")
        self.prefill.add_done_callback(self._forget_prefill)

    def _forget_prefill(self, _: asyncio.Task[None]) -> None:
        # A cancelled task keeps its frames, which refer to this attempt. Without this, only the
        # garbage collector would free the request.
        self.prefill = None

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the attempt's workers."""
        return self.target.record.fingerprint

    @property
    def is_scored(self) -> bool:
        """Whether the attempt computes the log probabilities or the embedding of the prompt that
        the request wants."""
        return self.spec.embeds or self.spec.sampling.prompt_logprobs is not None

    @property
    def computes(self) -> bool:
        """Whether the worker that computes the prompt is still expected to send messages."""
        wanted = not self.decode_began.is_set() or self.owner.awaits_prompt
        return wanted and self.prefill is not None and not self.prefill.done()

    def touches(self, link: WorkerLink) -> bool:
        """Return whether a worker may have started on the attempt's sequences.

        False for the decode worker while the handoff is not complete. False for the prefill worker
        if it died before it sent a message."""
        has_begun = self.source.prefills.messages > self.messages_before
        return (link is self.source and has_begun) or self.decode_began.is_set()

    @property
    def unfinished(self) -> set[int]:
        """Numbers of the attempt's choices that need more tokens."""
        return {n for n in self.choices if not self.owner.choices[n].ended}

    @property
    def is_whole(self) -> bool:
        """Whether the decode worker has sent all requested tokens of the attempt."""
        whole = not self.failed and bool(self.choices) and not self.unfinished
        return whole and self.touches(self.target)

    @property
    def runs_at_worker(self) -> bool:
        """Whether the decode worker may still run one of the attempt's choices."""
        choices = self.owner.choices
        return not self.failed and any(not choices[n].worker_finished for n in self.choices)


class RunningChoice:
    """One choice of a running request: its accepted tokens and its unread output."""

    def __init__(self, number: int, processor: OutputProcessor, attempt: int = 0) -> None:
        self.number = number
        self.processor = processor
        self.attempt = attempt
        self.prefill_worker = self.decode_worker = ""
        """Slots of the prefill and the decode worker of the choice's latest attempt."""
        self.fingerprint = ""
        """Fingerprint of these workers."""
        self.batch_size = 0.0
        """Batch size in the latest decode steps of the choice's worker."""
        self.preemptions = 0
        """Number of times that a worker has handed back the choice."""
        self.token_ids: list[int] = []
        self.unread: list[OutputDelta] = []
        """Output that the client has not read yet. It is merged when the client reads it. To save
        memory, every ``_PART`` pieces are merged earlier."""
        self._loose = 0
        """Number of unread pieces of output that are not merged yet."""
        self.worker_finished = False
        self.is_over = False
        self._early: dict[int, TokenOutput] = {}
        self._stop_taken = False

    @property
    def ended(self) -> bool:
        """Whether the choice needs no more tokens."""
        return self.worker_finished or self.processor.finished

    def place(self, attempt: int, source: WorkerRecord, target: WorkerRecord) -> None:
        """Record the workers at which the choice runs next. At other workers, it continues after
        its accepted tokens."""
        self.attempt = attempt
        self.prefill_worker, self.decode_worker = source.slot, target.slot
        self.fingerprint = target.fingerprint
        self._early.clear()

    def accept(self, output: TokenOutput, cached_prompt_tokens: int) -> None:
        """Process a worker's output of this choice."""
        if output.index > len(self.token_ids):
            self._keep(output)
            return
        self._take(output, cached_prompt_tokens)
        while (index := min(self._early, default=math.inf)) <= len(self.token_ids):
            self._take(self._early.pop(int(index)))

    def accept_tokens(self, index: int, token_ids: tuple[int, ...]) -> bool:
        """Process tokens of this choice that a worker has sent without anything else. Return
        whether the choice goes on.

        ``index``: the output index of the first one."""
        if index != len(self.token_ids) or self._early:
            self.accept(TokenOutput("", self.attempt, index, token_ids), 0)
        else:
            self.token_ids += token_ids
            delta = self.processor.push(token_ids)
            if delta is not None:
                self._show(delta, len(token_ids))
                return delta.finish_reason is None
        return not self.processor.finished

    def _keep(self, early: TokenOutput) -> None:
        kept = self._early.get(early.index)
        if kept is None or len(kept.token_ids) <= len(early.token_ids):
            self._early[early.index] = early

    def _take(self, output: TokenOutput, cached_prompt_tokens: int = 0) -> None:
        known = len(self.token_ids) - output.index
        new = output.token_ids[known:]
        if new or cached_prompt_tokens or output.finish_reason is not None:
            self.token_ids.extend(new)
            delta = self.processor.push(
                new, output.finish_reason, cached_prompt_tokens, output.logprobs[known:]
            )
            if delta is not None:
                self._show(delta, len(new))
        if output.finish_reason is not None:
            self.worker_finished = True

    def _show(self, delta: OutputDelta, tokens: int) -> None:
        """Keep a delta of ``tokens`` new tokens until the client reads it."""
        if tokens > 1:
            # An output is of one step: one drawn token after the accepted drafts.
            delta.accepted_drafts = tokens - 1
        if delta.finish_reason is not None:
            delta.prefill_worker = self.prefill_worker
            delta.decode_worker = self.decode_worker
            delta.batch_size = self.batch_size
        self.unread.append(delta)
        self._loose += 1
        if self._loose == _PART:
            self.unread[-_PART:] = [_joined(self.unread[-_PART:])]
            self._loose = 0

    def take(self) -> OutputDelta:
        """Return all unread output of the choice as one delta, and clear it."""
        pieces, self.unread, self._loose = self.unread, [], 0
        assert pieces, "there is nothing"
        delta = pieces[0] if len(pieces) == 1 else _joined(pieces)
        self.is_over = delta.finish_reason is not None
        delta.choice = self.number
        delta.fingerprint = self.fingerprint
        return delta

    def take_stopped(self) -> bool:
        """Return whether the worker must end the choice's sequence because of a stop string.
        Returns true only once."""
        wanted = self.processor.stopped and not (self.worker_finished or self._stop_taken)
        self._stop_taken = self._stop_taken or wanted
        return wanted


def _joined(pieces: Sequence[OutputDelta]) -> OutputDelta:
    last = pieces[-1]
    return OutputDelta(
        "".join(piece.text for piece in pieces),
        tuple(chain.from_iterable(piece.token_ids for piece in pieces)),
        last.finish_reason,
        sum(piece.cached_prompt_tokens for piece in pieces),
        reasoning_tokens=sum(piece.reasoning_tokens for piece in pieces),
        scored=tuple(chain.from_iterable(piece.scored for piece in pieces)),
        stop_string=last.stop_string,
        prefill_worker=last.prefill_worker,
        decode_worker=last.decode_worker,
        accepted_drafts=sum(piece.accepted_drafts for piece in pieces),
        batch_size=last.batch_size,
    )
