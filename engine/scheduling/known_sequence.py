"""The engine's own copy of a sequence: its tokens run ahead of the engine core's by a step."""

from __future__ import annotations

from dataclasses import dataclass

from baton.sampling_params import SamplingParams
from engine.scheduling.plan import NewSequence


@dataclass(slots=True)
class KnownSequence:
    """What the engine was told of a sequence, and its tokens by now. Owned by the engine thread."""

    token_ids: list[int]
    """Prompt and output; the runner appends to it."""
    prompt_length: int
    sampling: SamplingParams
    stop_ids: tuple[int, ...]
    choice: int
    takes_prompt: bool = True
    """Whether a drafter takes the prompt in as it is computed."""
    embeds: bool = False
    """Whether its embedding is wanted, with the next token."""

    @classmethod
    def of(cls, new: NewSequence) -> KnownSequence:
        """As it was when it came."""
        return cls(
            list(new.token_ids),
            new.prompt_length,
            new.sampling,
            new.stop_ids,
            new.choice,
            embeds=new.embeds,
        )
