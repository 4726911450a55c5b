"""The interface of the dispatcher: requests, deltas of their answers, and their choices so far."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from baton.logprobs import TokenLogprobs
from baton.reasoning import ReasoningSpan
from baton.request import NO_TRACE, FinishReason, Principal, Retention, TraceContext
from baton.sampling_params import SamplingParams
from baton.store.registry import WorkerRecord
from router.core.timeline import Timeline

AnswerPart = Literal["start", "reasoning", "content"]
"""Where a prompt ends: before its answer, in the answer's reasoning, or in the answer's content."""


@dataclass(frozen=True, slots=True)
class ReasoningMarkers:
    """The texts that mark the begin and the end of an answer's reasoning."""

    start: str
    ends: tuple[str, ...]
    repeat: bool = False
    """Whether an answer may have further reasoning after its first reasoning has ended."""


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of an answer, with its log probabilities."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int
    """Number of characters of the answer before this token's text."""
    hidden: bool = False
    """Whether the token ends the answer, so that its text is not shown."""


class ModelBinding:
    """The fingerprint whose workers answer a request, or all prompts of one API call.

        free ─an attempt begins→ held ─output arrives→ bound
        held ─all attempts end without output→ free

    So one answer comes from one fingerprint, and until it has begun, another one may give it."""

    def __init__(self, fingerprint: str = "") -> None:
        """Create a binding to ``fingerprint``; empty: it is free."""
        self._fingerprint = fingerprint
        self._attempts = 0
        self._is_bound = bool(fingerprint)

    def required(self, leaving: int = 0) -> str:
        """Return the fingerprint that the next attempt must have; empty if it may have any.

        ``leaving``: number of current attempts that the next one replaces."""
        return self._fingerprint if self._is_bound or self._attempts > leaving else ""

    def begin(self, fingerprint: str) -> None:
        """Record that an attempt at workers of ``fingerprint`` begins."""
        assert self.required() in ("", fingerprint), "one answer comes from one fingerprint"
        self._fingerprint = fingerprint
        self._attempts += 1

    def end(self) -> None:
        """Record the end of an attempt."""
        self._attempts -= 1

    def bind(self) -> None:
        """Record that output of a current attempt has arrived; idempotent."""
        self._is_bound = True


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt to be answered, checked and tokenized."""

    request_id: str
    """Id of the request, unique in the cluster. It is never a name that a client gave."""
    prompt_ids: tuple[int, ...]
    """Token ids of the prompt, all within the vocabulary; at least one."""
    sampling: SamplingParams
    """Sampling parameters, with final ``seed`` and ``max_tokens``."""
    principal: Principal
    deadline_s: float
    """Seconds from now until the request's deadline."""
    cache_salt: bytes = b""
    """Salt that separates prefix caches: requests share cached blocks only if their salts are
    equal."""
    session: str = ""
    """The client's name for the conversation that the request belongs to; empty if it gave none."""
    cache_key: str = ""
    """Requests with the same cache key go to the same worker if possible. Empty means no
    preference."""
    retentions: tuple[Retention, ...] = ()
    """Blocks of the prompt that stay cached for longer than others."""
    priority: int = 0
    """Priority among the waiting requests of one tenant. Lower values go first."""
    own_deadline: bool = False
    """Whether the client set the deadline. If so, admission uses the deadline instead of an SLO."""
    shown_ids: tuple[int, ...] = ()
    """Ids of special tokens whose text is shown although that of other special tokens is hidden."""
    background: bool = False
    """Whether the request waits, without limit, for spare capacity. ``deadline_s`` then counts from
    its admission."""
    choices: int = 1
    """Number of answers to the prompt. Each of them ends independently."""
    shows_stop_string: bool = False
    """Whether the text of an answer includes the stop string that ended the answer."""
    shows_special_tokens: bool = False
    """Whether the text of an answer includes special tokens, except for the one that ended the
    answer."""
    embeds: bool = False
    """Whether the prompt's embedding is requested instead of an answer."""
    prompt_only: bool = False
    """Whether the request only computes the prompt's KV into a cache. It then gets no answer."""
    chat: bool = False
    """Whether the prompt is a conversation."""
    begins_in: AnswerPart = "start"
    """Where a conversation's prompt ends: before the answer, or in which part of it."""
    reasoning_markers: ReasoningMarkers | None = None
    """Texts around the answer's reasoning, by which reasoning tokens are counted. None means that
    the answer has no reasoning."""
    reasoning_span: ReasoningSpan | None = None
    """Token ids of the reasoning markers, if the reasoning has a budget or a grammar follows it;
    else None."""
    model: str = ""
    """The served model's id."""
    agent: str = ""
    """The client's name for the agent that sent the request, for the bill; empty if it gave
    none."""
    run_id: str = ""
    """The client's name for the run that the request belongs to, such as a run of an agent, for the
    log."""
    trace: TraceContext = NO_TRACE
    """Trace context that the client sent. When the request runs, the trace context of its own span
    replaces it."""
    timeline: Timeline = field(default_factory=Timeline, compare=False, repr=False)
    """The request's timeline, to which the dispatcher adds. When the request runs, the recorder's
    replaces it."""
    without_speculation: bool = False
    """Whether speculative decoding is off for this request."""
    without_prefix_cache: bool = False
    """Whether the request uses no cached blocks of other requests, and others use none of its
    blocks."""
    binding: ModelBinding = field(default_factory=ModelBinding, compare=False, repr=False)
    """The fingerprint that answers the request. The prompts of one API call share it."""

    @property
    def block_salt(self) -> bytes:
        """Salt of the request's block hashes. A request migration does not change it."""
        own = self.request_id.encode() if self.without_prefix_cache else b""
        return self.cache_salt + own

    @property
    def scores_prompt(self) -> bool:
        """Whether the prompt's log probabilities are requested."""
        return self.sampling.prompt_logprobs is not None

    @property
    def awaits_prompt(self) -> bool:
        """Whether the answer must wait for log probabilities or an embedding of the prompt.

        The first token of a prompt has no log probability."""
        return self.embeds or (self.scores_prompt and len(self.prompt_ids) > 1)


# Making a frozen object takes four times as long, and most tokens have a delta of their own.
@dataclass(slots=True)
class OutputDelta:
    """The output of one choice since its previous delta. Only the dispatcher changes it."""

    text: str
    """New text of the choice, in whole characters; empty while text is held back."""
    token_ids: tuple[int, ...]
    """New tokens that count as generated, including those whose text is not shown."""
    finish_reason: FinishReason | None
    """Why the choice has ended. Set only in the last delta of a choice."""
    cached_prompt_tokens: int = 0
    """Number of prompt tokens whose KV was found in a cache; set in one delta of a request."""
    written_prompt_tokens: int = 0
    """Number of prompt tokens whose KV was computed and is retained; set in one delta of a
    request."""
    choice: int = 0
    """Index of the choice that the output belongs to."""
    scored: tuple[ScoredToken, ...] = ()
    """The tokens whose text was shown since the previous delta, if log probabilities are
    requested."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Log probabilities of each prompt token except the first. Set in a request's first delta, if
    they are requested."""
    stop_string: str = ""
    """The stop string that ended the choice, in its last delta."""
    embedding: tuple[float, ...] = ()
    """The prompt's embedding: fp32 [hidden_size], normalized to length 1. Set in a request's only
    delta, if the embedding is requested."""
    prefill_worker: str = ""
    decode_worker: str = ""
    """Slots of the prefill worker and the decode worker of the choice's latest attempt. Set in the
    choice's last delta."""
    reasoning_tokens: int = 0
    """Number of reasoning tokens, without the markers. Tokens that may begin a marker are counted
    in a later delta."""
    accepted_drafts: int = 0
    """Number of ``token_ids`` that were draft tokens, accepted in the same step as another
    token."""
    batch_size: float = 0.0
    """Mean batch size in the latest decode steps of the choice's worker; 0 if there were none. Set
    in the last delta of a choice."""
    fingerprint: str = ""
    """Fingerprint of the workers that answer; the same in all deltas of a request."""


def without_answer(delta: OutputDelta) -> OutputDelta:
    """Return the last delta of an answer without the answer: it keeps only the data about the
    prompt."""
    return OutputDelta(
        "",
        (),
        FinishReason.LENGTH,
        delta.cached_prompt_tokens,
        delta.written_prompt_tokens,
        delta.choice,
        prompt_logprobs=delta.prompt_logprobs,
        embedding=delta.embedding,
        fingerprint=delta.fingerprint,
    )


@dataclass(slots=True)
class Choice:
    """The answer of one choice so far. Only a request's first choice counts the prompt's tokens."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    written_tokens: int = 0
    """Number of prompt tokens whose KV was computed and is retained."""
    reasoning_tokens: int = 0
    """Number of reasoning tokens among ``completion_tokens``, without the markers."""
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    """The stop string that ended the choice; empty if none did."""
    begun: bool = False
    decode_worker: str = ""
    """Slot of the choice's latest decode worker; empty until the choice has ended."""
    accepted_drafts: int = 0
    """Number of the choice's tokens that were accepted draft tokens."""
    fingerprint: str = ""
    """Fingerprint of the workers that answer; empty until the choice has begun."""

    def add(self, delta: OutputDelta, *, keep_text: bool) -> None:
        """Add a delta to the counts of the choice. Its text is stored only if ``keep_text`` is
        set.
        """
        self.completion_tokens += len(delta.token_ids)
        self.cached_tokens += delta.cached_prompt_tokens
        self.written_tokens += delta.written_prompt_tokens
        self.reasoning_tokens += delta.reasoning_tokens
        self.finish_reason = delta.finish_reason
        self.stop_string = delta.stop_string
        self.decode_worker = delta.decode_worker
        self.accepted_drafts += delta.accepted_drafts
        self.fingerprint = delta.fingerprint
        self.begun = True
        if keep_text:
            self.pieces.append(delta.text)

    @property
    def text(self) -> str:
        """The text of all deltas that were added with ``keep_text``."""
        return "".join(self.pieces)

    @property
    def finish(self) -> Literal["stop", "length"]:
        """The finish reason in words; valid only once the choice has ended."""
        return "stop" if self.finish_reason is FinishReason.STOP else "length"


def choices_for(requests: Sequence[GenerationRequest]) -> list[Choice]:
    """Create an empty choice for each answer of each request, in the order of the requests."""
    return [
        Choice(len(request.prompt_ids) if number == 0 else 0)
        for request in requests
        for number in range(request.choices)
    ]


Relay = Callable[[OutputDelta], bool]
"""Function that passes a delta on to the client. It returns false, and does nothing, if it would
have to wait for the client."""


class Dispatcher(Protocol):
    """Runs requests on the cluster's workers."""

    def check_place(self, tenant: str, priority: int) -> None:
        """Check whether a tenant's request of this priority can be queued, however short it is.
        Raises Overloaded."""

    def generate(
        self, request: GenerationRequest, relay: Relay | None = None
    ) -> AsyncIterator[OutputDelta]:
        """Answer a request: an async generator. While its reader waits, deltas may go to ``relay``
        instead, in their order. This spares the reader's task the work of waking up.

        The last delta of each choice has a finish reason. Deltas are coalesced, so a slow reader
        gets fewer and larger ones. Closing the generator (``aclose``) aborts the request on the
        workers. Raises ``BatonError``.
        """

    def health(self) -> tuple[str, str]:
        """Return ``ok``, ``degraded`` or ``down``, and the reason in words ("" when ok)."""

    def metrics_addresses(self) -> list[str]:
        """Return host:port of every worker's /metrics page."""

    def worker_records(self) -> Sequence[WorkerRecord]:
        """Return the registry record of every worker."""

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
