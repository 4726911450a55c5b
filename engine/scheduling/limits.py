"""Bounds of a scheduler's steps and sequences: how far a sequence may go, and when it ends.

Plain Python.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from baton.request import FinishReason
from engine.scheduling.sequence import Sequence

SCORED_TOKENS = 128
"""So many rows of 128k logits take 64 MiB, and a matrix product of so many is at its full speed."""


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``chunk_tokens`` and ``max_sequences`` bound one step; ``context_length`` one sequence.

    ``chunk_keys`` bounds what a chunk's attention costs: its tokens times the tokens that the last
    of them attends to. Without it a step late in a long prompt takes many times as long as the
    first, and nobody can join, leave or be aborted meanwhile. 0 sets no bound.
    """

    block_size: int
    chunk_tokens: int
    max_sequences: int
    context_length: int
    chunk_keys: int = 0
    hash_block_size: int = 0
    """Tokens of a hash block, of which ``block_size`` is a multiple; 0: as many."""
    scored_tokens: int = SCORED_TOKENS
    """Most tokens of a step whose logits are computed to score the prompt's next one; a prompt that
    comes when they are used up scores one."""
    draft_tokens: int = 0
    """The most tokens that the engine drafts for a sequence in a step."""

    def __post_init__(self) -> None:
        if self.block_size % self.hash_block:
            raise ValueError(
                f"a block of {self.block_size} tokens holds no whole hash blocks of "
                f"{self.hash_block}"
            )

    @property
    def hash_block(self) -> int:
        """Tokens of a hash block."""
        return self.hash_block_size or self.block_size

    @property
    def hashes_per_block(self) -> int:
        """Hash blocks of a block."""
        return self.block_size // self.hash_block

    def max_tokens(self, start: int) -> int:
        """The longest chunk that may begin at token ``start``; at least one token."""
        if not self.chunk_keys:
            return self.chunk_tokens
        # The largest n with n * (start + n) <= chunk_keys.
        n = (math.isqrt(start * start + 4 * self.chunk_keys) - start) // 2
        return max(1, min(self.chunk_tokens, n))


class SequenceBounds:
    """Answers by a scheduler's limits and a sequence's state; changes neither."""

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
        """The most tokens that a sequence's answer leaves room for."""
        sampling = sequence.spec.sampling
        return min(self._limits.context_length, sequence.prompt_length + sampling.max_tokens)

    def known_at_most(self, sequence: Sequence) -> int:
        """The most tokens that a sequence has when the steps in flight have ended."""
        if not sequence.pending:
            return sequence.target
        most = len(sequence.token_ids) + sequence.pending * (1 + self._limits.draft_tokens)
        return min(most, sequence.highest)

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self._limits.block_size)

    def may_draft(self, sequence: Sequence) -> bool:
        """Whether its next step only draws its next token, and more of them are wanted.

        The first token of those that it came for comes alone: somebody is told of it at once.
        """
        if not self._limits.draft_tokens or sequence.prefill_only:
            return False
        target = sequence.target
        return target - sequence.scheduled == 1 and target != len(sequence.spec.token_ids)

    def row_limit(self, sequence: Sequence) -> int:
        """See ``PlanRow.limit``."""
        if not self.may_draft(sequence):
            return 0
        room = len(sequence.block_table) * self._limits.block_size
        return min(self.max_tokens(sequence), room + 1)

    def finish_reason(self, sequence: Sequence, token: int) -> FinishReason | None:
        """Why a sequence ends with its last token, ``token``; None where it does not."""
        sampling = sequence.spec.sampling
        if token in sequence.stop_ids and self._may_stop(sequence):
            return FinishReason.STOP
        if sequence.output_length >= sampling.max_tokens:
            return FinishReason.LENGTH
        if len(sequence.token_ids) >= self._limits.context_length:
            return FinishReason.LENGTH
        return None

    def _may_stop(self, sequence: Sequence) -> bool:
        """Whether a stop token ends the answer: a grammar's end goes before ``min_tokens``."""
        sampling = sequence.spec.sampling
        return sequence.output_length > sampling.min_tokens or sampling.grammar is not None
