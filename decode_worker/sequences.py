"""The sequences of a decode worker, and the messages to their routers: one per step.

    kept ─steps→ tokens ─end, error, abort, handed back→ forgotten

Owned by the worker's event loop.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from opentelemetry.trace import Span

from baton.errors import BatonError
from baton.logprobs import TokenLogprobs
from baton.request import AttemptName, PackedTokens, TokenOutput
from baton.telemetry.tracing import Attribute, begin_span, fail_span, trace_id_of
from engine.scheduling.sequence import Sequence
from worker.prefill.flow import attempt_of

_MAX_PACKED_RUNS = 1 << 16
"""Maximum number of runs of packed tokens in one message, so that no message is too large."""


@dataclass(frozen=True, slots=True)
class Unsent:
    """What an outbox has for its router. The tokens go before the outputs."""

    tokens: list[PackedTokens] = field(default_factory=list)
    outputs: list[TokenOutput] = field(default_factory=list)
    granted: list[AttemptName] = field(default_factory=list)
    """Refused requests of the router for which this worker now holds room."""

    def __bool__(self) -> bool:
        return bool(self.tokens or self.outputs or self.granted)


class Outbox:
    """Outputs for one router: each step makes one message, with all sequences of the router.

    A new stream replaces the previous one. A router that reads slowly finds several steps in one
    message. The ``max_tokens`` of its sequences bound how many outputs wait.
    """

    def __init__(self, now: float) -> None:
        self._unsent = Unsent()
        self._filled = asyncio.Event()
        self.knows_full = False
        """Whether the load in the router's latest message shows that all places of the batch are
        taken."""
        self._reader = 0
        self._is_read = False
        self._unread_since = now

    def put(self, output: TokenOutput) -> None:
        """Add an output to the router's next message."""
        self._unsent.outputs.append(output)

    def put_tokens(self, number: int, index: int, token_ids: Collection[int]) -> None:
        """Add tokens of a choice without anything else to the router's next message.

        ``number`` is the router's number of the choice, ``index`` the first token's output index.
        """
        waiting = self._unsent.tokens
        if not waiting or len(waiting[-1].numbers) >= _MAX_PACKED_RUNS:
            waiting.append(PackedTokens())
        waiting[-1].add(number, index, token_ids)

    def grant(self, attempt: AttemptName) -> None:
        """Tell the router at once that this worker holds room for a request that it has refused."""
        self._unsent.granted.append(attempt)
        self._filled.set()

    def flush(self) -> None:
        """Allow the stream to send the outputs of a step that has ended."""
        if self._unsent:
            self._filled.set()

    def hurry(self) -> None:
        """Wake the stream, so that it sends its next message at once, even an empty one."""
        self._filled.set()

    def open(self) -> int:
        """Register a new stream, which replaces the previous one. Returns its number."""
        self._reader += 1
        self._is_read = True
        # The previous stream, if it still waits, finds that it is replaced.
        self._filled.set()
        return self._reader

    def is_current(self, reader: int) -> bool:
        """Whether stream number ``reader`` is the newest one."""
        return reader == self._reader

    def close(self, reader: int, now: float) -> None:
        """Record that stream number ``reader`` has ended."""
        if self.is_current(reader):
            self._is_read = False
            self._unread_since = now

    @property
    def is_read(self) -> bool:
        """Whether a stream is open."""
        return self._is_read

    def unread_for(self, now: float) -> float:
        """Return the seconds since the last open stream ended; 0 while a stream is open."""
        return 0.0 if self._is_read else now - self._unread_since

    async def wait(self, timeout_s: float) -> None:
        """Wait until there are outputs to send, or until ``timeout_s`` have passed."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._filled.wait()

    def take(self) -> Unsent:
        """Remove and return what waits to be sent."""
        self._filled.clear()
        unsent, self._unsent = self._unsent, Unsent()
        return unsent


class RunningSequences:
    """All sequences on this worker by request and choice, their trace spans, and their routers'
    outboxes."""

    def __init__(self, worker: str, clock: Callable[[], float]) -> None:
        """``worker`` is this worker's slot. ``clock`` measures how long routers are silent, in
        seconds."""
        self._worker = worker
        self._clock = clock
        self._choices: dict[AttemptName, dict[int, Sequence]] = {}
        """The choices of each request by number, including those that have not begun."""
        self._spans: dict[int, Span] = {}
        """The trace span of each sequence. It lasts from the sequence's first token on this worker,
        or from its queueing, to its end."""
        self._outboxes: dict[str, Outbox] = {}
        """The outbox of each router, by its id."""

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._choices.get(attempt_of(sequence), {}).values()

    def has(self, attempt: AttemptName) -> bool:
        """Whether any choice of a request is on this worker."""
        return attempt in self._choices

    def each(self) -> list[Sequence]:
        """Return all sequences on this worker."""
        return [each for choices in self._choices.values() for each in choices.values()]

    def attempts(self, router_id: str) -> list[AttemptName]:
        """Return the attempts of a router's requests on this worker."""
        return [
            attempt
            for attempt, choices in self._choices.items()
            if any(each.spec.router_id == router_id for each in choices.values())
        ]

    def serve(self, router_id: str) -> bool:
        """Whether any sequence on this worker is of a router's request."""
        return any(
            each.spec.router_id == router_id
            for choices in self._choices.values()
            for each in choices.values()
        )

    def keep(self, sequence: Sequence) -> None:
        """Add a sequence and its siblings to this collection. It is called when the sequence joins
        the batch or is queued."""
        choices = (sequence, *sequence.siblings)
        self._choices[attempt_of(sequence)] = {choice.choice: choice for choice in choices}
        for choice in choices:
            self._begin_span(choice)

    def forget(self, attempt: AttemptName, choice: int | None = None) -> list[Sequence]:
        """Remove a request, or one of its choices. Returns the sequences that were removed."""
        choices = self._choices.get(attempt, {})
        if choice is None:
            gone = list(choices.values())
            choices.clear()
        else:
            gone = [choices.pop(choice)] if choice in choices else []
        for sequence in gone:
            self._end_span(sequence)
        if not choices:
            self._choices.pop(attempt, None)
        return gone

    def _begin_span(self, sequence: Sequence) -> None:
        attributes: dict[str, Attribute] = {
            "baton.worker": self._worker,
            "baton.choice": sequence.choice,
        }
        span = begin_span("decode", sequence.spec.trace, attributes=attributes)
        if trace_id_of(span):
            self._spans[sequence.sequence_id] = span

    def _end_span(self, sequence: Sequence, error: BatonError | None = None) -> None:
        """End a sequence's trace span; idempotent."""
        span = self._spans.pop(sequence.sequence_id, None)
        if span is None:
            return
        span.set_attributes(
            {
                "gen_ai.usage.output_tokens": sequence.output_length,
                "baton.computed_prompt_tokens": sequence.computed_here,
                "baton.preemptions": sequence.preemptions,
            }
        )
        if sequence.finish_reason is not None:
            span.set_attribute("gen_ai.response.finish_reasons", [sequence.finish_reason.value])
        elif error is not None:
            fail_span(span, error)
        span.end()

    # Messages to routers

    def outbox(self, router_id: str) -> Outbox:
        """Return a router's outbox. The first call for a router makes its outbox."""
        if router_id not in self._outboxes:
            self._outboxes[router_id] = Outbox(self._clock())
        return self._outboxes[router_id]

    def is_read(self, router_id: str) -> bool:
        """Return whether a router reads its token stream."""
        box = self._outboxes.get(router_id)
        return box is not None and box.is_read

    def send(
        self,
        sequence: Sequence,
        token_ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...] = (),
    ) -> None:
        """Add a sequence's new tokens to the next message to its router."""
        spec = sequence.spec
        index = sequence.output_length - len(token_ids)
        if spec.output_number and sequence.finish_reason is None and not logprobs:
            number = spec.output_number + sequence.choice - spec.choice
            self.outbox(spec.router_id).put_tokens(number, index, token_ids)
            return
        output = TokenOutput(
            spec.request_id,
            spec.attempt,
            index,
            token_ids,
            sequence.finish_reason,
            choice=sequence.choice,
            logprobs=logprobs,
        )
        self.outbox(spec.router_id).put(output)

    def send_end(self, sequence: Sequence, error: BatonError | None = None) -> None:
        """Add a sequence's end to the next message to its router, after all its tokens.

        Without an ``error``, the sequence has lost its blocks and is handed back.
        """
        spec = sequence.spec
        output = TokenOutput(
            spec.request_id,
            spec.attempt,
            sequence.output_length,
            (),
            error="" if error is None else error.message,
            error_code="" if error is None else error.code or "",
            choice=sequence.choice,
            handed_back=error is None,
        )
        self._end_span(sequence, error)
        self.outbox(spec.router_id).put(output)

    def flush(self) -> None:
        """Allow the outputs of a step that has ended to be sent to their routers."""
        for outbox in self._outboxes.values():
            outbox.flush()

    @property
    def is_known_full(self) -> bool:
        """Whether a router knows that the batch is full."""
        return any(outbox.knows_full for outbox in self._outboxes.values())

    def tell_places(self) -> None:
        """Send a message at once to the routers that know the batch as full: it is full no
        more."""
        for outbox in self._outboxes.values():
            if outbox.knows_full:
                outbox.hurry()

    def lost_routers(self, grace_s: float) -> list[str]:
        """Return the routers that have had no open token stream for ``grace_s`` seconds, and drop
        their outboxes."""
        now = self._clock()
        lost = [name for name, box in self._outboxes.items() if box.unread_for(now) >= grace_s]
        for router_id in lost:
            del self._outboxes[router_id]
        return lost
