"""Where an answer's reasoning lies, in tokens."""

from __future__ import annotations

from dataclasses import dataclass

Run = tuple[int, ...]
"""Consecutive token ids."""


@dataclass(frozen=True, slots=True)
class ReasoningSpan:
    """The tokens around a model's reasoning, and how long it may be.

    A grammar applies behind it. An answer that does not begin with ``start`` has no reasoning.
    """

    ends: tuple[Run, ...]
    """Each of these ends the reasoning; at least one, and none is empty."""
    start: Run = ()
    """What the answer begins with to reason; empty: the prompt has begun the reasoning."""
    budget: int | None = None
    """Maximum tokens of the reasoning, without those of ``start`` and ``ends``; None: any."""
    forced: Run = ()
    """What comes when the budget is used up. It ends with one of ``ends``."""
