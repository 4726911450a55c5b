"""What a step brought a sequence. Plain Python."""

from __future__ import annotations

from dataclasses import dataclass

from baton.logprobs import TokenLogprobs
from engine.scheduling.sequence import Sequence


@dataclass(frozen=True, slots=True)
class SequenceUpdate:
    """What a step brought a sequence: new tokens, computed prompt tokens, perhaps its end."""

    sequence: Sequence
    token_ids: tuple[int, ...]
    computed_prompt_tokens: int
    logprobs: tuple[TokenLogprobs, ...] = ()
    """One for each token, where they are wanted."""
    failure: str = ""
    """Not empty: the sequence could not go on and has ended, and why."""
    lost: bool = False
    """It has ended: an earlier step failed, and it lacks the tokens of that step."""
