"""What has come so far of each answer of a request, for every API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from baton.request import FinishReason
from router.core.request import GenerationRequest, OutputDelta


@dataclass(slots=True)
class Choice:
    """What has come so far of one answer. A prompt's tokens count with its first answer alone."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    pieces: list[str] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    stop_string: str = ""
    """What has ended it, where a stop string has."""
    begun: bool = False

    def add(self, delta: OutputDelta, *, keep_text: bool) -> None:
        self.completion_tokens += len(delta.token_ids)
        self.cached_tokens += delta.cached_prompt_tokens
        self.finish_reason = delta.finish_reason
        self.stop_string = delta.stop_string
        self.begun = True
        if keep_text:
            self.pieces.append(delta.text)

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def finish(self) -> Literal["stop", "length"]:
        """The reason, once there is one."""
        return "stop" if self.finish_reason is FinishReason.STOP else "length"


def choices_for(requests: Sequence[GenerationRequest]) -> list[Choice]:
    """Of the first prompt, of the second, and so on."""
    return [
        Choice(len(request.prompt_ids) if number == 0 else 0)
        for request in requests
        for number in range(request.choices)
    ]
