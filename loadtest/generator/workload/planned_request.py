"""A request that is to be sent."""

from __future__ import annotations

from dataclasses import dataclass

Prompt = str | tuple[int, ...]
"""Text, or token ids."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """What is sent, and when."""

    number: int
    due_s: float
    """Seconds after the run's beginning. In a closed loop requests go as others end, and this is
    0."""
    prompt: Prompt
    input_tokens: int
    """Of the prompt: exact where it is token ids, otherwise about."""
    output_tokens: int
    """Most tokens of the answer; the very number where the end of sequence is ignored."""
