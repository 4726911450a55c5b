"""Describes where an answer's reasoning lies, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

Run = tuple[int, ...]
"""Consecutive token ids."""


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The tokens around a model's reasoning, and its maximum length.

    A grammar applies after it. An answer that does not begin with ``start`` has no reasoning.
    """

    ends: tuple[Run, ...]
    """Each of these ends the reasoning; at least one, and none is empty."""
    start: Run = ()
    """The tokens with which reasoning starts; empty: the prompt has started the reasoning."""
    budget: int | None = None
    """Maximum number of reasoning tokens, without those of ``start`` and ``ends``; None: no
    limit."""
    forced: Run = ()
    """Tokens that are forced when the budget is used up. They end with one of ``ends``."""
