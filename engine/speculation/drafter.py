"""What guesses the next tokens of a sequence, so that one step can check several of them.

A draft changes no answer: each of its tokens is kept only while it is the very token that the model
draws there. A drafter is asked by the engine thread alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Draft:
    """Tokens that may come next, and how much speaks for them."""

    token_ids: list[int]
    evidence: int
    """Of its first token, 1 or more, in the drafter's own measure; each token behind it has one
    more, since those before it were right when it counts."""


class Drafter(Protocol):
    """One for an engine; it may keep state for each sequence."""

    @property
    def name(self) -> str:
        """As the configuration and the metrics call it."""

    def propose(self, sequence_id: int, token_ids: list[int], most: int) -> Draft | None:
        """At most ``most`` tokens, which is positive, behind ``token_ids``, or None.

        ``token_ids`` is the whole sequence, prompt and output; what was there at the last call is
        there unchanged.
        """

    def forget(self, sequence_id: int) -> None:
        """Drop the state of a sequence; one that is not known is ignored."""
