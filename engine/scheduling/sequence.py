"""A sequence: the scheduler's state of one choice, its bounds, and the result of its steps.

The bounds limit the size of steps and sequences, and decide when a sequence ends. Plain Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.grammar import TokenMatcher
from baton.hashing import block_hashes
from baton.logprobs import TokenLogprobs
from baton.request import FinishReason, SequenceSpec


class Sequence:
    """One choice of a request, until it ends. Only the scheduler changes it.

    A request's choices share the prompt until the first token of each is drawn, all from the same
    logits. ``siblings`` are the choices that start then. A sibling writes into a block of its own.
    If the prompt ends within a block, that block is first copied from ``copy_of``.
    """

    __slots__ = (
        "block_table",
        "cached_tokens",
        "choice",
        "compute_s",
        "computed",
        "computed_here",
        "copy_of",
        "deadline",
        "embedding",
        "finish_reason",
        "hash_key",
        "hashes",
        "highest",
        "in_flight",
        "known_to_engine",
        "matcher",
        "pending",
        "preempted",
        "preemptions",
        "prefill_only",
        "prompt_logprobs",
        "queue_s",
        "queued_at",
        "registered",
        "returning",
        "scheduled",
        "sequence_id",
        "siblings",
        "spare",
        "spec",
        "steady_until",
        "stop_ids",
        "takes_prompt",
        "token_ids",
    )

    def __init__(
        self,
        sequence_id: int,
        spec: SequenceSpec,
        *,
        stop_ids: tuple[int, ...],
        hash_key: bytes,
        prefill_only: bool = False,
        queued_at: float = 0.0,
        deadline: float = math.inf,
        choice: int = 0,
    ) -> None:
        """``prefill_only``: true if the sequence ends after one token and keeps its blocks until
        they are released.

        Nothing is computed after ``deadline``, which is on the same clock as ``queued_at``.
        """
        self.sequence_id = sequence_id
        self.spec = spec
        self.stop_ids = stop_ids
        self.hash_key, self.prefill_only = hash_key, prefill_only
        self.queued_at = queued_at
        self.queue_s = 0.0
        self.deadline = deadline
        self.token_ids: list[int] = list(spec.token_ids)
        self.block_table: tuple[int, ...] = ()
        """The sequence's blocks, in order. A changed table is a new tuple, so the engine notices
        changes by identity."""
        self.hashes: list[bytes] = []
        """Hashes of the sequence's full hash blocks. Only hashes that were needed so far have been
        computed."""
        self.registered = 0
        """Number of leading blocks that are registered in the prefix cache."""
        self.computed = 0
        """Number of leading tokens whose KV is in the cache."""
        self.scheduled = 0
        """Value that ``computed`` has after all plans in flight have ended."""
        self.pending = 0
        """Number of steps in flight that sample for this sequence. The engine may already have the
        tokens of these steps; the scheduler does not have them yet."""
        self.highest = 0
        """Maximum number of tokens that the sequence can have after all plans in flight have ended,
        including draft tokens. It is only kept if the engine drafts tokens."""
        # As long as the target is not larger, the next decode step needs no block and no check.
        self.steady_until = 0
        self.in_flight = 0
        """Number of plans in flight that have a row for this sequence."""
        self.cached_tokens = 0
        """Number of prompt tokens whose KV was found in the prefix cache."""
        self.computed_here = 0
        """Number of leading tokens that this worker computed, in ``compute_s`` seconds."""
        self.compute_s = 0.0
        """Seconds of engine steps attributed to this sequence, by its share of each step's
        tokens."""
        self.known_to_engine = False
        self.preempted = False
        self.preemptions = spec.preemptions
        self.returning = False
        """Whether the sequence was preempted and its blocks are being loaded from an offload tier.
        The sequence keeps its position in the queue."""
        self.finish_reason: FinishReason | None = None
        self.choice = choice
        self.siblings: tuple[Sequence, ...] = ()
        self.copy_of: int | None = None
        """A pinned block of the parent, which is copied into the sequence's own block before its
        first step."""
        self.spare: list[int] = []
        """Blocks that are allocated for the first writes of siblings."""
        self.prompt_logprobs: list[TokenLogprobs] = []
        self.takes_prompt = True
        """Whether a drafter may process the prompt while the prompt is computed."""
        self.embedding: tuple[float, ...] = ()
        """Embedding of the prompt, if the request wants it; set with the first token."""
        self.matcher: TokenMatcher | None = None

    def follow(self, matcher: TokenMatcher | None) -> None:
        """Set the grammar of this sequence and its siblings. Call it before they are queued.

        ``matcher`` must be at the start of an answer. It is copied, and not changed.
        """
        for choice in (self, *self.siblings):
            choice.matcher = matcher

    @property
    def prompt_length(self) -> int:
        return self.spec.prompt_length

    @property
    def output_length(self) -> int:
        """Number of generated tokens, including those of earlier attempts."""
        return len(self.token_ids) - self.spec.prompt_length

    @property
    def target(self) -> int:
        """Number of tokens whose KV must be computed before the next sample, including samples in
        flight."""
        return len(self.token_ids) + self.pending

    @property
    def has_begun(self) -> bool:
        """Whether the sequence has generated a token on this worker."""
        return len(self.token_ids) > len(self.spec.token_ids)

    @property
    def may_be_handed_back(self) -> bool:
        """Whether the router places this sequence again after a preemption.

        A sequence without a new token is not handed back, because the router waits for its first
        token from this worker.
        """
        return self.spec.hand_back and self.has_begun and not self.prefill_only

    @property
    def scores_prompt(self) -> bool:
        """Whether log probabilities of the prompt's tokens are wanted and not complete yet.

        Only the request's first choice computes them, before its first token.
        """
        if self.spec.sampling.prompt_logprobs is None or self.choice != self.spec.choice:
            return False
        return not self.has_begun and len(self.prompt_logprobs) < self.prompt_length - 1

    def full_hashes(self, hash_block: int) -> list[bytes]:
        """Return the hashes of all full hash blocks of the known tokens; ``hash_block`` is in
        tokens."""
        self.hashes = block_hashes(self.token_ids, hash_block, self.hash_key, self.hashes)
        return self.hashes


@dataclass(slots=True)
class SequenceUpdate:
    """The result of a step for one sequence: new tokens, number of computed prompt tokens, and why
    it has ended, if so.

    It never changes. It is not frozen, because each step makes one for each sequence
    (``engine.scheduling.plan.PlanRow``).
    """

    sequence: Sequence
    token_ids: tuple[int, ...]
    computed_prompt_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """Log probabilities, one entry for each new token; empty if they are not wanted."""
    finish_reason: FinishReason | None = None
    """Why the last of ``token_ids`` has ended the sequence; None if it has not. The sequence itself
    may have ended in a later step when the update is read."""
    failure: str = ""
    """Why the sequence's grammar could not continue, so that the sequence has ended; empty if it
    did not fail."""
    error: Exception | None = None
    """Error with which the sequence has ended, because its result could not be applied; None if it
    was."""


SCORED_TOKENS = 128
"""Default maximum number of prompt tokens that are scored in a step. 128 rows of 128k logits take
64 MiB, and a matrix product of this size reaches full speed."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``chunk_tokens`` and ``max_sequences`` bound one step; ``context_length`` bounds one
    sequence.

    ``chunk_keys`` bounds the attention cost of a chunk: its tokens times the tokens that its last
    token attends to. Without it, a step late in a long prompt takes many times as long as the
    first, and no other sequence can join, leave or be aborted meanwhile. 0 sets no bound.
    """

    block_size: int
    chunk_tokens: int
    max_sequences: int
    context_length: int
    chunk_keys: int = 0
    hash_block_size: int = 0
    """Number of tokens in a hash block, a divisor of ``block_size``; 0 means ``block_size``."""
    scored_tokens: int = SCORED_TOKENS
    """Maximum number of prompt tokens that are scored in a step, over all its prompts. Once this
    number is used up, each further prompt in the step still scores one token."""
    draft_tokens: int = 0
    """Maximum number of tokens that the engine drafts for one sequence in a step; 0 without
    speculation."""

    def __post_init__(self) -> None:
        if self.block_size % self.hash_block:
            raise ValueError(
                f"block_size {self.block_size} must be a multiple of the hash block size, "
                f"{self.hash_block}"
            )

    @property
    def hash_block(self) -> int:
        """Number of tokens in a hash block."""
        return self.hash_block_size or self.block_size

    @property
    def hashes_per_block(self) -> int:
        """Number of hash blocks per block."""
        return self.block_size // self.hash_block

    def max_tokens(self, start: int) -> int:
        """Maximum number of tokens in a chunk that begins at position ``start``; at least one."""
        if not self.chunk_keys:
            return self.chunk_tokens
        # The largest n with n * (start + n) <= chunk_keys.
        n = (math.isqrt(start * start + 4 * self.chunk_keys) - start) // 2
        return max(1, min(self.chunk_tokens, n))


class SequenceBounds:
    """Computes the maximum length, draft room and end of sequences from a scheduler's limits. It
    changes nothing."""

    __slots__ = ("_limits",)

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits

    def can_run(self, sequence: Sequence) -> bool:
        samples_left = sequence.spec.sampling.max_tokens - sequence.output_length - sequence.pending
        if (sequence.prefill_only or sequence.siblings) and sequence.pending:
            return False
        fits = sequence.target < self._limits.context_length
        return sequence.scheduled < sequence.target and samples_left > 0 and fits

    def max_tokens(self, sequence: Sequence) -> int:
        """Maximum length of a sequence, prompt and answer together, in tokens."""
        sampling = sequence.spec.sampling
        return min(self._limits.context_length, sequence.prompt_length + sampling.max_tokens)

    def known_at_most(self, sequence: Sequence) -> int:
        """Maximum number of tokens that a sequence can have once the steps in flight have ended."""
        if not (sequence.pending and self._limits.draft_tokens):
            return sequence.target
        most = len(sequence.token_ids) + sequence.pending * (1 + self._limits.draft_tokens)
        return min(most, sequence.highest)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether a sequence's next step may include draft tokens. It may if the step computes only
        the sequence's newest token.

        The first new token is never combined with drafts, so that it is sent at once.
        """
        if not self._limits.draft_tokens or sequence.prefill_only:
            return False
        if sequence.spec.without_speculation:
            return False
        target = sequence.target
        return target - sequence.scheduled == 1 and target != len(sequence.spec.token_ids)

    def row_limit(self, sequence: Sequence) -> int:
        """Value of ``PlanRow.limit`` for a sequence's next row: its maximum length after the step;
        0 without drafts."""
        if not self.may_draft(sequence):
            return 0
        room = len(sequence.block_table) * self._limits.block_size
        return min(self.max_tokens(sequence), room + 1)

    def steady_until(self, sequence: Sequence) -> int:
        """Number of tokens up to which a sequence is steady: as long as its target is not larger,
        its next decode step needs no block and no check. The last planned step must compute only
        its newest token.

        0 for a sequence with drafts or siblings, since its steps differ.
        """
        if self._limits.draft_tokens or sequence.prefill_only or sequence.siblings:
            return 0
        room = len(sequence.block_table) * self._limits.block_size
        return min(room, self.max_tokens(sequence) - 1)

    def finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why a sequence ends with ``token`` as its last token; None if it does not end."""
        sampling = sequence.spec.sampling
        if token in sequence.stop_ids and self._may_stop(sequence):
            return FinishReason.STOP
        if sequence.output_length >= sampling.max_tokens:
            return FinishReason.LENGTH
        if len(sequence.token_ids) >= self._limits.context_length:
            return FinishReason.LENGTH
        return None

    def _may_stop(self, sequence: Sequence) -> bool:
        """Whether a stop token now ends the answer. A stop token that a grammar allows ends it even
        before ``min_tokens``."""
        sampling = sequence.spec.sampling
        return sequence.output_length > sampling.min_tokens or sampling.grammar is not None
