"""The state of an answer in its grammar: which tokens may follow, also after draft tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.errors import GrammarFailed
from baton.grammar import TokenMatcher, reason_in

Mask = npt.NDArray[np.uint32]
"""Bit mask of allowed tokens, uint32 [words]: one bit per token of the vocabulary, from the lowest
bit up; 1 if the token is allowed. Bits after the vocabulary have no meaning."""


class AnswerState(Protocol):
    """Tracks one sequence's output, and computes which tokens may come next. Owned by the engine
    thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def length(self) -> int:
        """Number of output tokens that were added and not rolled back."""

    def advance(self, token_ids: Iterable[int]) -> None:
        """Add drawn tokens to the tracked output. Raises GrammarFailed for a token that is not
        allowed."""

    def rollback(self, count: int) -> None:
        """Remove the latest ``count`` output tokens. Raises GrammarFailed."""

    def fill(self, mask: Mask) -> None:
        """Clear the bits of tokens that may not come next, in a mask of ones. Raises
        GrammarFailed."""


def masks_of(state: AnswerState, draft_tokens: Sequence[int] = ()) -> npt.NDArray[np.uint32]:
    """Make the masks for the next token, and for the token after each of ``draft_tokens``.

    Returns uint32 [1 + drafts, words]. After a draft token that is not allowed, the masks allow all
    tokens, because draws there have no effect. The state is the same afterwards. Raises
    GrammarFailed.
    """
    words = -(-state.vocab_size // 32)
    rows = np.full((1 + len(draft_tokens), words), 0xFFFFFFFF, np.uint32)
    began = state.length
    try:
        state.fill(rows[0])
        for place, token in enumerate(draft_tokens):
            if not _allows(rows[place], token):
                break
            state.advance([token])
            state.fill(rows[place + 1])
    finally:
        state.rollback(state.length - began)
    return rows


class GrammarState:
    """Tracks a grammar's matcher along a sequence's output. Implements ``AnswerState``.

    Once the text is complete in the grammar, it stays complete. A step that was already planned may
    still draw tokens; these are counted but not matched.
    """

    def __init__(
        self,
        matcher: TokenMatcher,
        vocab_size: int,
        *,
        stop_ids: Iterable[int] = (),
        min_tokens: int = 0,
        never: Iterable[int] = (),
    ) -> None:
        """The tokens ``stop_ids`` may not be drawn before the output has ``min_tokens`` tokens. The
        tokens ``never`` may not be drawn at all.

        Both are allowed if the grammar allows no other token.
        """
        self._matcher = matcher
        self.vocab_size = vocab_size
        self.before = 0
        """Number of output tokens before the text that must match the grammar (the reasoning)."""
        self._min_tokens = min_tokens
        never = frozenset(never)
        self._later = all_but(never, vocab_size)
        self._early = all_but(never.union(stop_ids), vocab_size)
        self._limits = bool(never) or (min_tokens > 0)
        self._taken = 0
        self._behind = 0

    @property
    def length(self) -> int:
        """Number of tokens of the text that must match the grammar. Tokens before that text
        (``before``) are not included."""
        return self._taken + self._behind

    def advance(self, token_ids: Iterable[int]) -> None:
        """Match drawn tokens against the grammar. Raises GrammarFailed for a token that is not
        allowed."""
        for token in token_ids:
            if self._matcher.is_stopped():
                self._check()
                self._behind += 1
                continue
            if not self._matcher.consume_token(token):
                self._check()
                raise GrammarFailed("the engine drew a token that the grammar does not allow")
            self._taken += 1

    def rollback(self, count: int) -> None:
        """Remove the latest ``count`` tokens from the matched text. Raises GrammarFailed."""
        behind = min(count, self._behind)
        self._behind -= behind
        if count > behind:
            if not self._matcher.rollback(count - behind):
                self._check()
                raise GrammarFailed("the grammar's state cannot be rolled back")
            self._taken -= count - behind

    def fill(self, mask: Mask) -> None:
        """Write into ``mask`` which tokens may come next. Raises GrammarFailed."""
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        self._check()
        if not self._limits:
            return
        allowed = mask & (
            self._early if self.before + self.length < self._min_tokens else self._later
        )
        if allowed.any():
            mask[:] = allowed

    def _check(self) -> None:
        if self._matcher.is_error():
            why = reason_in(self._matcher.get_error())
            raise GrammarFailed(f"the grammar's matcher failed: {why}")


def all_but(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """Make a mask that allows all tokens except ``token_ids``."""
    bits = np.ones(vocab_size, np.bool_)
    bits[[token for token in token_ids if 0 <= token < vocab_size]] = False
    return pack(bits)


def pack(bits: npt.NDArray[np.bool_]) -> Mask:
    """Pack bool [vocab_size], true for allowed tokens, into a mask."""
    padded = np.zeros(-(-len(bits) // 32) * 32, np.bool_)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.uint32)


def unpack(mask: Mask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """Unpack a mask into bool [vocab_size], true for allowed tokens."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def _allows(mask: Mask, token: int) -> bool:
    return bool(int(mask[token // 32]) >> (token % 32) & 1)
