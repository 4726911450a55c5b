"""Data about requests that packages pass to each other: plain and frozen."""

from __future__ import annotations

import enum
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from baton.logprobs import TokenLogprobs
from baton.reasoning import ReasoningSpan
from baton.sampling_params import SamplingParams

AttemptName = tuple[str, int]
"""A request's id, and the number of the attempt to run it."""

MAX_STATE = 512
"""Maximum length of a tracestate, in characters. This is the minimum that the W3C recommends to
pass on; a longer one is dropped."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The two headers of W3C Trace Context (level 1); empty if the request is not traced.

    They are untrusted input until ``baton.telemetry.tracing`` has parsed them.
    """

    traceparent: str = ""
    tracestate: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Return the trace headers that are not empty, by name."""
        both = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in both.items() if value}


NO_TRACE = TraceContext()


class FinishReason(enum.StrEnum):
    """Why a sequence ended without an error; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


LOWEST_PRIORITY = (1 << 31) - 1
"""The priority of background work: it loses its blocks first."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The tenant and key of a request.

    ``key_id`` is a public name of the API key, never the key.
    """

    tenant: str = "default"
    key_id: str = ""


@dataclass(frozen=True, slots=True)
class Retention:
    """A request to keep the blocks of a prompt's leading tokens for longer than other cached
    blocks."""

    tokens: int
    """Number of leading tokens of the prompt. Blocks that end within them are kept."""
    ttl_s: float
    name: str = ""
    """Name of a pin. A pin keeps all of the blocks or none, until it expires or is removed. Without
    a name, blocks are kept as far as there is room, until newer ones need it."""
    required: bool = False
    """Whether the request fails if the blocks cannot be kept."""


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """All data that a worker needs to run a sequence, at the sequence's start or after a
    migration."""

    request_id: str
    attempt: int
    router_id: str
    token_ids: tuple[int, ...]
    """The prompt, then the tokens that the router has already accepted."""
    prompt_length: int
    sampling: SamplingParams
    cache_salt: bytes = b""
    context_class: str = ""
    principal: Principal = Principal()
    deadline_s: float = 300.0
    """Seconds left to the request when this spec was made."""
    choices: int = 1
    """Number of answers that are sampled from one prompt."""
    choice: int = 0
    """Number of the first of the sequence's choices among all choices of the request. It is an
    input of the sampling noise."""
    priority: int = 0
    """Priority of the sequence: when blocks run out, sequences with higher numbers are preempted
    first."""
    preemptions: int = 0
    """How often the sequence lost its blocks, at any worker."""
    hand_back: bool = False
    """Whether a decode worker without blocks hands the sequence back to the router, which places it
    again. Otherwise that worker computes it again."""
    embeds: bool = False
    """Whether the client wants the prompt's embedding. One token is sampled too, and dropped."""
    retentions: tuple[Retention, ...] = ()
    cache_ttl_s: float = 0.0
    """Maximum time that the sequence's blocks stay cached after their last use, in seconds; 0 sets
    no bound."""
    trace: TraceContext = NO_TRACE
    """Trace context of the parent of the worker's spans."""
    reasoning: ReasoningSpan | None = None
    """Where the answer's reasoning lies; None: the grammar applies to all of the answer, and the
    reasoning has no limit."""
    without_speculation: bool = False
    """Whether speculative decoding is off for the sequence."""
    output_number: int = 0
    """The router's number of ``choice``, by which ``PackedTokens`` name it. The number of
    ``choice + n`` is higher by n. 0: the router does not read packed tokens."""

    @property
    def max_token_id(self) -> int:
        """The largest token id in any field; -1 if there is no token id."""
        sampling, span = self.sampling, self.reasoning
        biased = [token for token, _ in sampling.logit_bias]
        runs = [self.token_ids, sampling.stop_token_ids, sampling.allowed_token_ids, biased]
        runs += sampling.bad_words
        if span is not None:
            runs += [*span.ends, span.start, span.forced]
        return max([max(run) for run in runs if run], default=-1)


@dataclass(slots=True)
class PackedTokens:
    """Tokens of choices that have nothing else to report, in columns: most tokens of a step.

    Each run of tokens has an item in each column except ``token_ids``.
    """

    numbers: list[int] = field(default_factory=list)
    """The choice of each run, by the numbers of ``SequenceSpec.output_number``."""
    indexes: list[int] = field(default_factory=list)
    """Output index of each run's first token."""
    counts: list[int] = field(default_factory=list)
    """Number of tokens in each run."""
    token_ids: list[int] = field(default_factory=list)
    """The tokens of all runs."""

    def add(self, number: int, index: int, token_ids: Collection[int]) -> None:
        """Add a run of tokens; ``index`` is the output index of its first token."""
        self.numbers.append(number)
        self.indexes.append(index)
        self.counts.append(len(token_ids))
        self.token_ids.extend(token_ids)


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Tokens of one sequence, in order; ``index`` is the output index of the first of them."""

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str = ""
    """Reason of the sequence's failure; empty: it has not failed."""
    error_code: str = ""
    """Code of the error that ended the sequence, see ``baton.errors``; empty: no error."""
    choice: int = 0
    """Number of the request's choice that the tokens belong to."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities of ``token_ids``, one each, or empty."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """Log probabilities of the prompt's tokens after the first. They come with the first token, if
    the request wants them."""
    handed_back: bool = False
    """Whether the worker has taken away the sequence's blocks and dropped it. The router places it
    again."""
    embedding: tuple[float, ...] = ()
    """The embedding, fp32 [hidden_size], of length 1. It comes with the first token of a request
    that wants it."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of one choice, sampled where the prompt was computed."""

    token_id: int
    finish_reason: FinishReason | None = None
    """Reason why the choice ends, if this token ends the choice; else None."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """A worker's load at one moment, in sequences, tokens and blocks."""

    incarnation: str = ""
    running: int = 0
    waiting: int = 0
    waiting_tokens: int = 0
    free_blocks: int = 0
    cached_blocks: int = 0
    used_blocks: int = 0
    quarantined_blocks: int = 0
    engine_steps: int = 0
    context_tokens: int = 0
    """Tokens whose KV the running sequences hold."""
    step_ms: float = 0.0
    """Mean wall time of the latest steps in which every sequence decoded, in milliseconds, each
    with the pause before it; 0 before the first."""
    step_batch: float = 0.0
    """Mean number of sequences in the steps that ``step_ms`` covers."""
    step_context_tokens: float = 0.0
    """Mean number of tokens that all sequences of a step together attended to, in the steps that
    ``step_ms`` covers."""
    host_blocks: int = 0
    """Cached blocks in the host memory tier."""
    disk_blocks: int = 0
    """Cached blocks on disk."""
    steps_in_flight: int = 0
    """Number of steps that the engine has received and not finished. While there are any,
    ``engine_steps`` must grow."""
    prompt_tokens: int = 0
    """Prompt tokens computed since the worker started."""
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV was found in the worker's caches, or fetched from another worker's."""
    pinned_blocks: int = 0
    """Blocks that pinned prefixes cover, whether or not they are cached now."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The shape of a drafter's part of every KV block; block size and KV type are the target's."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a worker's KV cache: the target's part of every block, and the drafter's."""

    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    tensor_parallel: int = 1
    drafter: GroupShape | None = None
    """The drafter's part, which lies after the target's; None: there is none."""


def fingerprint_of(kv_group: str) -> str:
    """Return the fingerprint of the workers of a KV group (``WorkerRecord.kv_group`` of
    ``baton.store.registry``)."""
    return kv_group.partition(" ")[0]
