"""Which tokens may follow in an answer, draft tokens included; where it stands in its grammar."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from baton.errors import GrammarFailed
from baton.grammar import TokenMatcher, reason_in

Mask = npt.NDArray[np.uint32]
"""[words]: a bit for each token of the vocabulary, from the lowest bit up; 1 for one that may be
drawn. Bits behind the vocabulary mean nothing."""


class AnswerState(Protocol):
    """Follows the output tokens of one sequence. Owned by the engine thread."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def length(self) -> int:
        """Output tokens so far."""

    def advance(self, token_ids: Iterable[int]) -> None:
        """Go on by tokens that were drawn. Raises GrammarFailed for one that may not come."""

    def rollback(self, count: int) -> None:
        """Take the latest ``count`` tokens back. Raises GrammarFailed."""

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next into a mask of ones. Raises GrammarFailed."""


def masks_of(state: AnswerState, draft_tokens: Sequence[int] = ()) -> npt.NDArray[np.uint32]:
    """Which tokens may come next, and which behind each of ``draft_tokens``.

    uint32 [1 + drafts, words]. Behind a draft token that may not come itself everything may:
    nothing that is drawn there counts. The state stays where it is. Raises GrammarFailed.
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
    """The output tokens that a matcher has taken. Implements ``AnswerState``.

    A text that has ended stays ended: what a step that was planned meanwhile draws behind its end
    is counted, and not matched.
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
        """``stop_ids`` may not be drawn before ``min_tokens``, nor ``never`` at all, but where

        nothing else may.
        """
        self._matcher = matcher
        self.vocab_size = vocab_size
        self.before = 0
        """Output tokens before the text that the grammar is about."""
        self._min_tokens = min_tokens
        never = frozenset(never)
        self._later = all_but(never, vocab_size)
        self._early = all_but(never.union(stop_ids), vocab_size)
        self._limits = bool(never) or (min_tokens > 0)
        self._taken = 0
        self._behind = 0

    @property
    def length(self) -> int:
        """Tokens so far, without those in ``before``."""
        return self._taken + self._behind

    def advance(self, token_ids: Iterable[int]) -> None:
        """Go on by tokens that were drawn. Raises GrammarFailed for one that may not come."""
        for token in token_ids:
            if self._matcher.is_stopped():
                self._check()
                self._behind += 1
                continue
            if not self._matcher.consume_token(token):
                self._check()
                raise GrammarFailed("a token came that the grammar does not allow")
            self._taken += 1

    def rollback(self, count: int) -> None:
        """Take the latest ``count`` tokens back. Raises GrammarFailed."""
        behind = min(count, self._behind)
        self._behind -= behind
        if count > behind:
            if not self._matcher.rollback(count - behind):
                self._check()
                raise GrammarFailed("the grammar cannot go back")
            self._taken -= count - behind

    def fill(self, mask: Mask) -> None:
        """Write which tokens may come next. Raises GrammarFailed."""
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
            raise GrammarFailed(f"the grammar could not be followed any further: {why}")


def all_but(token_ids: Iterable[int], vocab_size: int) -> Mask:
    """A mask of all tokens except these."""
    bits = np.ones(vocab_size, np.bool_)
    bits[[token for token in token_ids if 0 <= token < vocab_size]] = False
    return pack(bits)


def pack(bits: npt.NDArray[np.bool_]) -> Mask:
    """A mask of bool [vocab_size]."""
    padded = np.zeros(-(-len(bits) // 32) * 32, np.bool_)
    padded[: len(bits)] = bits
    return np.packbits(padded, bitorder="little").view(np.uint32)


def unpack(mask: Mask, vocab_size: int) -> npt.NDArray[np.bool_]:
    """bool [vocab_size] of a mask: the tokens that may be drawn."""
    bits = np.unpackbits(mask.view(np.uint8), count=vocab_size, bitorder="little")
    return bits.view(np.bool_)


def _allows(mask: Mask, token: int) -> bool:
    return bool(int(mask[token // 32]) >> (token % 32) & 1)
