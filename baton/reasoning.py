"""Describes where an answer's reasoning lies, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

Run = tuple[int, ...]
"""Consecutive token ids."""


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The tokens around a model's reasoning, and the maximum length of the reasoning.

    A grammar applies only after the reasoning. An answer that does not begin with ``start`` has no
    reasoning.
    """

    ends: tuple[Run, ...]
    """Token sequences that end the reasoning: at least one sequence, and none of them is empty."""
    start: Run = ()
    """The tokens with which reasoning starts; empty: the prompt has started the reasoning."""
    budget: int | None = None
    """Maximum number of reasoning tokens, without those of ``start`` and ``ends``; None: no
    limit."""
    forced: Run = ()
    """Tokens that are forced when the budget is used up. They end with one of ``ends``."""
