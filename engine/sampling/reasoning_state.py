"""The state of a sequence's reasoning: where it ends, by itself or forced, and what follows.

    before ── the start run ──► inside ── an end run, or the forced one ──► after: the grammar
    └───────── another token ──────────────────────────────────────────────┘

It depends only on the output tokens, so that it is the same after a migration.
"""

from __future__ import annotations

from collections.abc import Iterable

from baton.reasoning import ReasoningSpan, Run
from engine.sampling.grammar_state import GrammarState, Mask, all_but


class ReasoningState:
    """Tracks whether an answer is in its reasoning, and limits the reasoning to its budget.
    Implements ``AnswerState``."""

    def __init__(
        self,
        span: ReasoningSpan,
        vocab_size: int,
        *,
        stop_ids: Iterable[int] = (),
        grammar: GrammarState | None = None,
    ) -> None:
        """``grammar`` must be at its start. It applies to the text after the reasoning.

        With a grammar, the tokens ``stop_ids`` are not allowed within the reasoning.
        """
        self.vocab_size = vocab_size
        self._span = span
        self._grammar = grammar
        self._unstopped = None if grammar is None else all_but(stop_ids, vocab_size)
        self._length = 0
        self._tokens: list[int] = []
        """Output tokens up to the end of the reasoning; tokens after it are only in the grammar's
        state."""
        self._over = False
        """Whether the tracked tokens contain the end of the reasoning."""

    @property
    def length(self) -> int:
        """Number of output tokens that were added and not rolled back."""
        return self._length

    @property
    def is_free(self) -> bool:
        """Whether every token is allowed from now on: the reasoning has ended, and there is no
        grammar."""
        return self._over and self._grammar is None

    def advance(self, token_ids: Iterable[int]) -> None:
        """Add drawn tokens to the tracked output. Raises GrammarFailed for a token that is not
        allowed."""
        for token in token_ids:
            self._length += 1
            if self._over:
                self._follow([token])
                continue
            self._tokens.append(token)
            began = self._has_begun()
            if not began and not _is_prefix(self._tokens, self._span.start):
                self._end(before=0)
            elif began and self._has_ended():
                self._end(before=len(self._tokens))

    def rollback(self, count: int) -> None:
        """Remove the latest ``count`` output tokens. Raises GrammarFailed."""
        self._length -= count
        known = len(self._tokens)
        if self._length >= known:
            if self._grammar is not None:
                self._grammar.rollback(count)
            return
        if self._over and self._grammar is not None:
            self._grammar.rollback(self._grammar.length)
        self._over = False
        del self._tokens[self._length :]

    def fill(self, mask: Mask) -> None:
        """Clear the bits of tokens that may not come next, in a mask of ones. Raises
        GrammarFailed."""
        if self._over:
            if self._grammar is not None:
                self._grammar.fill(mask)
        elif not self._has_begun():
            self._fill_start(mask)
        elif (forced := self._forced()) is not None:
            _allow_only(mask, forced)
        elif self._unstopped is not None:
            mask[:] = self._unstopped

    def _fill_start(self, mask: Mask) -> None:
        """Fill the mask at the answer's beginning: allow the tokens that start the reasoning, or
        the grammar's text."""
        if self._grammar is None:
            return
        begun = len(self._tokens)
        if begun:
            _allow_only(mask, self._span.start[begun])
            return
        self._grammar.fill(mask)
        first = self._span.start[0]
        mask[first // 32] |= _bit(first)

    def _has_begun(self) -> bool:
        return len(self._tokens) >= len(self._span.start) and _is_prefix(
            self._span.start, self._tokens
        )

    def _has_ended(self) -> bool:
        inside = len(self._tokens) - len(self._span.start)
        return any(
            len(end) <= inside and tuple(self._tokens[-len(end) :]) == end
            for end in self._span.ends
        )

    def _forced(self) -> int | None:
        """The token of the forced end of reasoning that must come next; None while the budget
        lasts."""
        span = self._span
        if span.budget is None:
            return None
        spent = len(span.start) + span.budget
        beyond = len(self._tokens) - spent
        if beyond < 0:
            return None
        # The model may have begun the forced run itself.
        latest = max(len(span.start), spent - len(span.forced))
        place = _overlap(self._tokens[latest:spent], span.forced) + beyond
        return span.forced[place] if place < len(span.forced) else None

    def _end(self, before: int) -> None:
        """Record that the reasoning has ended, and that the tokens after the first ``before``
        belong to the grammar's text."""
        self._over = True
        if self._grammar is not None:
            self._grammar.before = before
            self._follow(self._tokens[before:])

    def _follow(self, tokens: list[int]) -> None:
        if self._grammar is not None:
            self._grammar.advance(tokens)


def _is_prefix(tokens: list[int] | Run, whole: list[int] | Run) -> bool:
    return len(tokens) <= len(whole) and list(tokens) == list(whole[: len(tokens)])


def _overlap(tokens: list[int], run: Run) -> int:
    """Length of the longest proper prefix of ``run`` that is a suffix of ``tokens``."""
    for length in range(min(len(tokens), len(run) - 1), 0, -1):
        if tuple(tokens[-length:]) == run[:length]:
            return length
    return 0


def _bit(token: int) -> int:
    return 1 << (token % 32)


def _allow_only(mask: Mask, token: int) -> None:
    mask[:] = 0
    mask[token // 32] = _bit(token)
