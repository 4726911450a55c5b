"""What the model thinks of tokens: logarithms of their probabilities."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
"""Tokens that a client may ask for beside the one at each position."""


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Of one position of a text: natural logarithms of probabilities, those of the raw logits.

    No temperature, penalty, bias or filter has touched them.
    """

    logprob: float
    """Of the token that stands there."""
    top: tuple[tuple[int, float], ...] = ()
    """The likeliest token ids and theirs, likeliest first; of equal ones the lower id first."""
