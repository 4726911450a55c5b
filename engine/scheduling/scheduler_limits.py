"""What bounds a scheduler's steps and sequences. Plain Python."""

from __future__ import annotations

import math
from dataclasses import dataclass

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
