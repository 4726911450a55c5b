"""A request and its attempts, from its admission to its end: between workers and client.

    placed ─first token→ streaming ─finish reason, stop string→ finished
    placed, streaming ─moved→ placed, with the tokens that it has
    placed, streaming ─failure→ failed

Tokens of other attempts are dropped, duplicates skipped, early ones kept until their turn comes.
Each choice has its own attempt: they are placed together, and move one by one.
What the client has not read yet gathers in one delta: at most a whole answer.
Shared by the dispatcher, placement and failover; owned by the router's event loop.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

from opentelemetry.trace import Span

from baton.errors import BatonError, DeadlineExceeded
from baton.hashing import HashChain
from baton.host.background import spawn
from baton.logprobs import TokenLogprobs
from baton.request import LOWEST_PRIORITY, Retention, SequenceSpec, TokenOutput, TraceContext
from baton.rpc.grpc_errors import error_from_code
from router.core.request import GenerationRequest, OutputDelta, without_answer
from router.dispatch.retry_limits import FailedWorkers
from router.routing.routing_state import Promise
from router.text.output_processor import OutputProcessor
from router.workers.worker_link import WorkerLink

log = logging.getLogger(__name__)

_PART = 64


class RunningRequest:
    """A request, its choices, and what its attempts left behind."""

    def __init__(
        self,
        request: GenerationRequest,
        processors: Sequence[OutputProcessor],
        deadline: float,
    ) -> None:
        """A processor for each choice. ``deadline`` is on the monotonic clock."""
        self.request = request
        self.deadline = deadline
        self.choices: Sequence[RunningChoice] = tuple(
            RunningChoice(number, processor) for number, processor in enumerate(processors)
        )
        self.awaits_prompt = request.awaits_prompt
        """Whether nothing is given yet, since the prompt's log probabilities or its embedding are
        still to come."""
        self.attempts: set[Attempt] = set()
        """Those that are placed."""
        self.next_attempt = 0
        self.excluded: set[str] = set()
        """Workers that have failed under it."""
        self.failures = 0
        """How often it was to be moved because something failed."""
        self.chains: defaultdict[int, HashChain] = defaultdict(HashChain)
        """The hashes of each choice that was placed."""
        self.is_cache_counted = False
        """Whether it is known how much of the prompt was found in a cache."""
        self.moves: set[asyncio.Task[None]] = set()
        """Choices that are being placed again."""
        self._prompt_logprobs: Sequence[TokenLogprobs] = ()
        self._embedding: tuple[float, ...] = ()
        self._written_tokens = 0
        self._error: BatonError | None = None
        self._changed = asyncio.Event()

    @cached_property
    def failed_workers(self) -> FailedWorkers:
        """Made when a worker fails under it for the first time."""
        return FailedWorkers()

    # What is to be placed

    def groups(self, choices: Iterable[int]) -> list[tuple[int, ...]]:
        """The given choices in groups that are placed together.

        Those that lie side by side and have no token yet are one group, so that their prompt is
        computed once; else each is a sequence of its own.
        """
        numbers = sorted(choices)
        together = numbers == list(range(numbers[0], numbers[-1] + 1)) if numbers else False
        if together and not any(self.choices[n].token_ids for n in numbers):
            return [tuple(numbers)]
        return [(number,) for number in numbers]

    def token_ids(self, choice: int) -> tuple[int, ...]:
        """The prompt, and every token of a choice that was accepted from a worker."""
        return self.request.prompt_ids + tuple(self.choices[choice].token_ids)

    def left_s(self, now: float) -> float:
        """Seconds until it must have ended. Raises DeadlineExceeded."""
        left_s = self.deadline - now
        if left_s <= 0:
            raise DeadlineExceeded("the request's deadline passed while it waited")
        return left_s

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
    ) -> SequenceSpec:
        """The sequence of some choices that are placed together, as the next attempt.

        ``scored``: its worker finds the prompt's log probabilities, where they are wanted. Its
        worker keeps what ``retentions`` ask besides those of the request.
        """
        request, sampling = self.request, self.request.sampling
        return SequenceSpec(
            request_id=request.request_id,
            attempt=self.next_attempt,
            router_id=router_id,
            token_ids=self.token_ids(choices[0]),
            prompt_length=len(request.prompt_ids),
            sampling=sampling if scored else replace(sampling, prompt_logprobs=None),
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
        )

    def move(self, work: Coroutine[Any, Any, None]) -> None:
        """Do ``work``, which places choices again; whatever goes wrong with it ends the request."""
        task = asyncio.create_task(self._move(work), name="move")
        self.moves.add(task)
        task.add_done_callback(self.moves.discard)

    async def _move(self, work: Coroutine[Any, Any, None]) -> None:
        try:
            await work
        except BatonError as error:
            self.fail(error)
        except Exception as error:
            log.exception("request %s could not be moved", self.request.request_id)
            self.fail(BatonError(f"internal error: {type(error).__name__}"))

    # What workers report

    @property
    def several(self) -> bool:
        """Whether there is more than one choice."""
        return len(self.choices) > 1

    @property
    def stopped(self) -> bool:
        """Whether a stop string was found: the worker's sequence is to be ended."""
        return any(choice.processor.stopped for choice in self.choices)

    @property
    def finished(self) -> bool:
        """Whether every choice's last delta was given."""
        return all(choice.is_over for choice in self.choices)

    def accept(
        self,
        output: TokenOutput,
        *,
        cached_prompt_tokens: int = 0,
        written_prompt_tokens: int = 0,
        batch_size: float = 0.0,
    ) -> None:
        """Take in a worker's output; ``batch_size`` is that of its latest decode steps."""
        if output.choice >= len(self.choices):
            return
        choice = self.choices[output.choice]
        if output.attempt != choice.attempt:
            return
        self._written_tokens += written_prompt_tokens
        if output.error:
            self.fail(error_from_code(output.error_code or "worker_failed", output.error))
            return
        if self.awaits_prompt and (output.prompt_logprobs or output.embedding):
            self.awaits_prompt = False
            self._prompt_logprobs = output.prompt_logprobs
            self._embedding = output.embedding
        choice.batch_size = batch_size
        choice.accept(output, cached_prompt_tokens)
        if choice.unread and not self.awaits_prompt:
            self._changed.set()

    def take_stopped(self) -> list[int]:
        """Choices that a stop string has ended while the worker runs them: each is given once."""
        return [choice.number for choice in self.choices if choice.take_stopped()]

    def fail(self, error: BatonError) -> None:
        """End the request with an error, unless all of its answer is there."""
        is_there = all(choice.processor.finished for choice in self.choices)
        if self._error is None and (self.awaits_prompt or not is_there):
            self._error = error
            self._changed.set()

    # What the client reads

    async def next_delta(self) -> OutputDelta:
        """What has gathered of a choice since the last call; waits for something.

        Raises BatonError.
        """
        await self._changed.wait()
        choice = None if self.awaits_prompt else self._waiting()
        if choice is None:
            assert self._error is not None, "woken for nothing"
            raise self._error
        delta = choice.take()
        if self._prompt_logprobs:
            delta = replace(delta, prompt_logprobs=self._prompt_logprobs)
            self._prompt_logprobs = ()
        if self._embedding:
            delta = replace(delta, embedding=self._embedding)
            self._embedding = ()
        if self._written_tokens:
            delta = replace(delta, written_prompt_tokens=self._written_tokens)
            self._written_tokens = 0
        if self._error is None and not (self.several and self._waiting()):
            self._changed.clear()
        no_answer = self.request.embeds or self.request.prompt_only
        return without_answer(delta) if no_answer else delta

    def _waiting(self) -> RunningChoice | None:
        """The first choice with something to read."""
        for choice in self.choices:
            if choice.unread:
                return choice
        return None


@dataclass(eq=False, slots=True)
class Attempt:
    """Some choices of a request, at the workers where one placement has put them."""

    owner: RunningRequest
    spec: SequenceSpec
    source: WorkerLink
    """To the worker that computes the prompt."""
    target: WorkerLink
    """To the worker that decodes; ``source`` itself where it does both."""
    promise: Promise
    span: Span
    """From its placing to its end."""
    begun_at: float
    """On the monotonic clock."""
    choices: set[int]
    """Numbers of those that have not been handed back."""
    heard_before: int
    """Messages on the source's stream of prefills before it was begun."""
    decode_began: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the decode worker has sent a token: the handoff was committed."""
    prefill: asyncio.Task[None] | None = None
    """Follows the prefill, until its end."""
    failed: bool = False
    """Whether its decode worker has reported that it failed: nothing is left to abort."""

    def follow(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work``, which follows its prefill."""
        self.prefill = spawn(work, f"prefill {self.spec.request_id}")
        self.prefill.add_done_callback(self._forget_prefill)

    def _forget_prefill(self, _: asyncio.Task[None]) -> None:
        # A cancelled task keeps its frames, which keep this attempt: only the garbage collector
        # would free the request.
        self.prefill = None

    @property
    def computes(self) -> bool:
        """Whether something is still to come of its source."""
        wanted = not self.decode_began.is_set() or self.owner.awaits_prompt
        return wanted and self.prefill is not None and not self.prefill.done()

    def touches(self, link: WorkerLink) -> bool:
        """Whether a worker has had the sequence.

        One that waits to be handed over was not at its target, nor was one at a source that has
        died before it could send anything.
        """
        has_begun = self.source.prefills.messages > self.heard_before
        return (link is self.source and has_begun) or self.decode_began.is_set()

    @property
    def unfinished(self) -> set[int]:
        """Choices of which more tokens are wanted."""
        return {n for n in self.choices if not self.owner.choices[n].ended}

    @property
    def is_whole(self) -> bool:
        """Whether its decode worker has sent all that was wanted of it."""
        whole = not self.failed and bool(self.choices) and not self.unfinished
        return whole and self.touches(self.target)

    @property
    def runs_at_worker(self) -> bool:
        """Whether its decode worker may have something of it to end."""
        choices = self.owner.choices
        return not self.failed and any(not choices[n].worker_finished for n in self.choices)


class RunningChoice:
    """One answer of a request."""

    def __init__(self, number: int, processor: OutputProcessor, attempt: int = 0) -> None:
        self.number = number
        self.processor = processor
        self.attempt = attempt
        self.prefill_worker = self.decode_worker = ""
        """The names of the workers that it was placed at last."""
        self.batch_size = 0.0
        """Of the latest decode steps of its worker."""
        self.preemptions = 0
        """How often a worker has handed it back."""
        self.token_ids: list[int] = []
        self.unread: list[OutputDelta] = []
        """What the client has not read. It is joined when it is read, and before that in parts of
        ``_PART`` pieces, which take less memory."""
        self._loose = 0
        """How many pieces are not in such a part."""
        self.worker_finished = False
        self.is_over = False
        self._early: dict[int, TokenOutput] = {}
        self._stop_taken = False

    @property
    def ended(self) -> bool:
        """Whether no more tokens are wanted of it."""
        return self.worker_finished or self.processor.finished

    def place(self, attempt: int, prefill_worker: str, decode_worker: str) -> None:
        """It begins, or goes on elsewhere behind the tokens that were accepted."""
        self.attempt = attempt
        self.prefill_worker, self.decode_worker = prefill_worker, decode_worker
        self._early.clear()

    def accept(self, output: TokenOutput, cached_prompt_tokens: int) -> None:
        """Take in what a worker says of it."""
        if output.index > len(self.token_ids):
            self._keep(output)
            return
        self._take(output, cached_prompt_tokens)
        while (index := min(self._early, default=math.inf)) <= len(self.token_ids):
            self._take(self._early.pop(int(index)))

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
                if len(new) > 1:
                    # An output is of one step, which draws one token and checks drafts of more.
                    delta = replace(delta, accepted_drafts=len(new) - 1)
                if delta.finish_reason is not None:
                    delta = replace(
                        delta,
                        prefill_worker=self.prefill_worker,
                        decode_worker=self.decode_worker,
                        batch_size=self.batch_size,
                    )
                self._keep_unread(delta)
        if output.finish_reason is not None:
            self.worker_finished = True

    def _keep_unread(self, delta: OutputDelta) -> None:
        self.unread.append(delta)
        self._loose += 1
        if self._loose == _PART:
            self.unread[-_PART:] = [_joined(self.unread[-_PART:])]
            self._loose = 0

    def take(self) -> OutputDelta:
        """What has gathered."""
        pieces, self.unread, self._loose = self.unread, [], 0
        assert pieces, "there is nothing"
        delta = pieces[0] if len(pieces) == 1 else _joined(pieces)
        self.is_over = delta.finish_reason is not None
        return replace(delta, choice=self.number) if self.number else delta

    def take_stopped(self) -> bool:
        """Whether its sequence is to be ended at the worker; once."""
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
