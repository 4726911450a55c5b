"""What APIs hand to the dispatcher, what comes back, and what has come back so far."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from baton.logprobs import TokenLogprobs
from baton.reasoning import ReasoningSpan
from baton.request import NO_TRACE, FinishReason, Principal, Retention, TraceContext
from baton.sampling_params import SamplingParams
from baton.store.registry import WorkerRecord

AnswerPart = Literal["start", "reasoning", "content"]
"""Where in an answer a prompt ends: before it, within its reasoning, or within its content."""


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts around an answer's reasoning."""

    start: str
    ends: tuple[str, ...]
    repeat: bool = False
    """Whether there may be reasoning behind reasoning."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, with what the model thought of it."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int
    """Characters of the answer before its text."""
    hidden: bool = False
    """It ends the answer, and its text is not shown."""


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to be answered, checked and tokenised."""

    request_id: str
    """Unique in the cluster; never a client's own name."""
    prompt_ids: tuple[int, ...]
    """Token ids within the vocabulary; at least one."""
    sampling: SamplingParams
    """With ``seed`` and ``max_tokens`` final."""
    principal: Principal
    deadline_s: float
    """Seconds from now until the request must have ended."""
    cache_salt: bytes = b""
    """Another salt, another prefix cache."""
    session: str = ""
    """What the client calls its conversation; empty: nothing was said."""
    cache_key: str = ""
    """Requests with the same key go to the same worker where possible; empty: no wish."""
    retentions: tuple[Retention, ...] = ()
    """Which of the prompt's blocks are to be kept for longer than others."""
    priority: int = 0
    """Lower comes earlier among those of one tenant that wait."""
    own_deadline: bool = False
    """The client said how long it would wait; admission judges by that, and by no SLO."""
    shown_ids: tuple[int, ...] = ()
    """Special tokens whose text is shown nevertheless."""
    background: bool = False
    """It waits, however long, for slack that others leave; ``deadline_s`` counts from then on."""
    choices: int = 1
    """Answers that are drawn from the prompt, side by side. Each ends on its own."""
    shows_stop_string: bool = False
    """Its text includes the stop string that ended it."""
    shows_special_tokens: bool = False
    """Its text includes special tokens, except for the one that ended it."""
    embeds: bool = False
    """The prompt's embedding is wanted, and no answer."""
    prompt_only: bool = False
    """The prompt's KV is wanted in a cache, and no answer."""
    chat: bool = False
    """The prompt is a conversation."""
    begins_in: AnswerPart = "start"
    """Where a conversation's prompt ends."""
    reasoning_markers: ReasoningMarkers | None = None
    """Those around the answer's reasoning, whose tokens are counted; None: it has none."""
    reasoning_span: ReasoningSpan | None = None
    """The same in tokens, where the reasoning is bounded or a grammar applies behind it."""
    model: str = ""
    """The served model's id."""
    agent: str = ""
    """The client's name of what sent it, for its bill; empty: nothing was said."""
    run_id: str = ""
    """The client's name of the run that it belongs to, for the log."""
    trace: TraceContext = NO_TRACE
    """Of the client; from its delivery on, of the request's own span."""
    without_speculation: bool = False
    """No tokens are drafted for it."""
    without_prefix_cache: bool = False
    """Neither does it find what other requests left in the caches, nor do they find what it left.
    """

    @property
    def block_salt(self) -> bytes:
        """What its block hashes are salted with: the same wherever it goes on after a move."""
        own = self.request_id.encode() if self.without_prefix_cache else b""
        return self.cache_salt + own

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log probabilities are wanted."""
        return self.sampling.prompt_logprobs is not None

    @property
    def awaits_prompt(self) -> bool:
        """Whether something is to be told of the prompt itself.

        The first token of a prompt has no log probability.
        """
        return self.embeds or (self.scores_prompt and len(self.prompt_ids) > 1)


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """What was generated since the last delta."""

    text: str
    """Whole characters; empty while text is held back."""
    token_ids: tuple[int, ...]
    """Tokens that count as generated, also those whose text is not shown."""
    finish_reason: FinishReason | None
    """Set in the last delta of a choice alone."""
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV was found; set in one delta of a request."""
    written_prompt_tokens: int = 0
    """Prompt tokens whose KV was computed and is retained; set in one delta of a request."""
    choice: int = 0
    """Which of the request's answers it is about."""
    scored: tuple[ScoredToken, ...] = ()
    """Where log probabilities are wanted: the tokens whose text was shown since the last delta."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Where they are wanted, in a request's first delta: of each token of the prompt but the
    first."""
    stop_string: str = ""
    """In the last delta of a choice that a stop string has ended: which one."""
    embedding: tuple[float, ...] = ()
    """fp32 [hidden_size], of length 1: where it is wanted, in a request's one delta."""
    prefill_worker: str = ""
    decode_worker: str = ""
    """In the last delta of a choice: the names of the workers that it ran at last."""
    reasoning_tokens: int = 0
    """Tokens of reasoning, without its markers. Those that may begin a marker come later."""
    accepted_drafts: int = 0
    """How many of ``token_ids`` were drafted, and came in the step of another token."""
    batch_size: float = 0.0
    """In the last delta of a choice: sequences in a decode step of its worker, the mean of the
    latest steps; 0 where there was none."""


def without_answer(delta: OutputDelta) -> OutputDelta:
    """The last delta of an answer of which nothing is wanted but what it says of the prompt."""
    return OutputDelta(
        "",
        (),
        FinishReason.LENGTH,
        delta.cached_prompt_tokens,
        delta.written_prompt_tokens,
        delta.choice,
        prompt_logprobs=delta.prompt_logprobs,
        embedding=delta.embedding,
    )


@dataclass(slots=True)
class Choice:
    """What has come so far of one answer. A prompt's tokens count with its first answer alone."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    """Prompt tokens that were computed and are retained."""
    reasoning_tokens: int = 0
    """Those of ``completion_tokens`` that are reasoning, without its markers."""
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    """What has ended it, where a stop string has."""
    begun: bool = False
    decode_worker: str = ""
    """The name of the worker that it ran at last; empty until it has ended."""
    accepted_drafts: int = 0
    """How many of its tokens were drafted."""

    def add(self, delta: OutputDelta, *, keep_text: bool) -> None:
        """Count a delta."""
        self.completion_tokens += len(delta.token_ids)
        self.cached_tokens += delta.cached_prompt_tokens
        self.written_tokens += delta.written_prompt_tokens
        self.reasoning_tokens += delta.reasoning_tokens
        self.finish_reason = delta.finish_reason
        self.stop_string = delta.stop_string
        self.decode_worker = delta.decode_worker
        self.accepted_drafts += delta.accepted_drafts
        self.begun = True
        if keep_text:
            self.pieces.append(delta.text)

    @property
    def text(self) -> str:
        """All that was kept."""
        return "".join(self.pieces)

    @property
    def finish(self) -> Literal["stop", "length"]:
        """The reason, once there is one."""
        return "stop" if self.finish_reason is FinishReason.STOP else "length"


def choices_for(requests: Sequence[GenerationRequest]) -> list[Choice]:
    """Of the first prompt, of the second, and so on."""
    return [
        Choice(len(request.prompt_ids) if number == 0 else 0)
        for request in requests
        for number in range(request.choices)
    ]


class Dispatcher(Protocol):
    """Runs requests on the cluster's workers."""

    def generate(self, request: GenerationRequest) -> AsyncIterator[OutputDelta]:
        """Answer a request: an async generator.

        The last delta of each choice has a finish reason. Deltas are coalesced, so a slow reader
        gets fewer and larger ones. Closing the generator (``aclose``) aborts the request on the
        workers.
        Raises ``BatonError``.
        """

    def health(self) -> tuple[str, str]:
        """``ok``, ``degraded`` or ``down``, and the reason in words ("" when ok)."""

    def metrics_addresses(self) -> list[str]:
        """host:port of every worker's /metrics page."""

    def worker_records(self) -> Sequence[WorkerRecord]:
        """What is known of every worker."""

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
