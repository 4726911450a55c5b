"""What travels between rooms about a request: plain frozen data."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from baton.logprobs import TokenLogprobs
from baton.reasoning import ReasoningSpan
from baton.sampling_params import SamplingParams

AttemptName = tuple[str, int]
"""A request's id, and the number of the attempt to run it."""

MAX_STATE = 512
"""Characters of a tracestate that are passed on, as the W3C's recommendation asks at least; a
longer one is dropped."""


@dataclass(frozen=True, slots=True)
class TraceContext:
    """The two headers of W3C Trace Context (level 1); empty ones: nobody traces.

    They are a client's own words until ``baton.telemetry.tracing`` has read them.
    """

    traceparent: str = ""
    tracestate: str = ""

    @property
    def headers(self) -> dict[str, str]:
        """Those that say something."""
        both = {"traceparent": self.traceparent, "tracestate": self.tracestate}
        return {name: value for name, value in both.items() if value}


NO_TRACE = TraceContext()


class FinishReason(enum.StrEnum):
    """Why a sequence ended well; the values are OpenAI's."""

    STOP = "stop"
    LENGTH = "length"


LOWEST_PRIORITY = (1 << 31) - 1
"""That of work in the background: it loses its blocks before anybody else."""


@dataclass(frozen=True, slots=True)
class Principal:
    """On whose behalf a request runs. ``key_id`` is a public name of the API key, never the key."""

    tenant: str = "default"
    key_id: str = ""


@dataclass(frozen=True, slots=True)
class Retention:
    """A wish to keep the blocks of a prompt's leading tokens for longer than others."""

    tokens: int
    """Blocks that end within these tokens are kept."""
    ttl_s: float
    name: str = ""
    """A pin's: it keeps all of the blocks or none, and stays until its time is over or it is ended.
    Without a name as many are kept as there is room for, until newer ones need it."""
    required: bool = False
    """The request fails where the blocks cannot be kept."""


@dataclass(frozen=True, slots=True)
class SequenceSpec:
    """All that a worker needs to run a sequence, at its start or after a move."""

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
    """Seconds left to the request when this was made."""
    choices: int = 1
    """How many answers are drawn, side by side, from one prompt."""
    choice: int = 0
    """The number of the first of them: it enters the noise."""
    priority: int = 0
    """Where blocks run out, sequences with higher numbers lose theirs first."""
    preemptions: int = 0
    """How often the sequence has lost its blocks, at whatever worker."""
    hand_back: bool = False
    """Its router places it again if a decode worker that runs out of blocks hands it back; else
    that worker computes it again itself."""
    embeds: bool = False
    """The prompt's embedding is wanted, beside one token that nobody reads."""
    retentions: tuple[Retention, ...] = ()
    cache_ttl_s: float = 0.0
    """Seconds after their last use until its blocks are forgotten; 0 sets no bound."""
    trace: TraceContext = NO_TRACE
    """Of what is above the spans of the worker."""
    reasoning: ReasoningSpan | None = None
    """Where the answer's reasoning lies; None: its grammar applies to all of it, and nothing bounds
    the reasoning."""
    without_speculation: bool = False
    """No tokens are drafted for it."""


@dataclass(frozen=True, slots=True)
class TokenOutput:
    """Tokens of one sequence, in order; ``index`` is the output index of the first of them."""

    request_id: str
    attempt: int
    index: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: str = ""
    """Not empty: the sequence has failed, and why."""
    error_code: str = ""
    """The error's code, see ``baton.errors``."""
    choice: int = 0
    """Which of the request's answers."""
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each of ``token_ids``, or none."""
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    """One for each token of the prompt but the first; with the first token of an answer whose
    request wants them."""
    handed_back: bool = False
    """The sequence has lost its blocks at its worker, which knows nothing of it any more: it is to
    be placed again."""
    embedding: tuple[float, ...] = ()
    """fp32 [hidden_size], of length 1; with the first token of a request that wants it."""


@dataclass(frozen=True, slots=True)
class FirstToken:
    """The first token of one choice, as it was sampled where the prompt was computed."""

    token_id: int
    finish_reason: FinishReason | None = None
    """Set if it ends the choice."""
    logprobs: TokenLogprobs | None = None


@dataclass(frozen=True, slots=True)
class LoadSnapshot:
    """What a worker is doing at one moment; counts of sequences, tokens and blocks."""

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
    """Mean wall milliseconds of the latest steps in which every sequence decoded, each with its
    pause before it; 0 before the first."""
    step_batch: float = 0.0
    """Sequences in these steps, on average."""
    step_context_tokens: float = 0.0
    """Tokens that the sequences of such a step attended to in all, on average."""
    host_blocks: int = 0
    """Cached blocks in the host's memory behind the pool."""
    disk_blocks: int = 0
    """Cached blocks on disk."""
    steps_in_flight: int = 0
    """Steps that the engine was given and has not ended: while there are some, ``engine_steps`` is
    to grow."""
    prompt_tokens: int = 0
    """Tokens of the prompts that were computed since the worker began."""
    cached_prompt_tokens: int = 0
    """Those of them whose KV was found in its caches, or fetched from another worker's."""
    pinned_blocks: int = 0
    """Blocks that pinned prefixes cover, whether they are cached at this moment or not."""


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The shape of a drafter's part of every KV block; block size and KV type are the target's."""

    layers: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class Geometry:
    """The shape of a worker's KV cache: of the target's part of every block, and what follows."""

    block_size: int
    layers: int
    kv_heads: int
    head_dim: int
    kv_dtype: str
    tensor_parallel: int = 1
    drafter: GroupShape | None = None
    """The drafter's part, which lies behind the target's; None: there is none."""
