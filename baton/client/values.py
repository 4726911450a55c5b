"""What the gRPC clients take and return."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from baton.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """``system``, ``user`` or ``assistant``."""
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn; what is None is left to the server. Ranges are the server's matter."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    seed: int | None = None
    max_tokens: int | None = None
    min_tokens: int | None = None
    ignore_eos: bool | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] = ()
    """The tokens that alone may be drawn; empty: all."""
    grammar: Grammar | None = None
    """What the answer's text must match."""
    logprobs: int | None = None
    """Tell each token's log probability, and those of so many of the likeliest."""

    def given(self) -> dict[str, Any]:
        """The fields that were set, by name."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, (), {})}


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV was found in a cache."""
    written_prompt_tokens: int = 0
    """Prompt tokens that were computed and are kept in the cache for longer: those of pins."""
    reasoning_tokens: int = 0
    """Those of ``completion_tokens`` that are reasoning."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, and the natural logarithm of its probability by the raw logits."""

    text: bytes
    """It may be half a character."""
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()
    """The likeliest tokens of this place, likeliest first."""


@dataclass(frozen=True, slots=True)
class Piece:
    """What came since the last piece."""

    text: str
    finish_reason: str | None = None
    """``stop`` or ``length``, once it is known."""
    usage: Usage | None = None
    """In the last piece."""
    logprobs: tuple[TokenScore, ...] = ()
    """Where they are asked for."""
    reasoning: str = ""
    """The reasoning of a chat's answer, which comes before its text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer."""

    text: str
    finish_reason: str | None
    usage: Usage
    logprobs: tuple[TokenScore, ...] = ()
    """Where they are asked for."""
    reasoning: str = ""
    """What the model thought before it answered, in a chat."""

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Answer:
        """Join the pieces of a stream."""
        texts: list[str] = []
        reasoning: list[str] = []
        scores: list[TokenScore] = []
        finish_reason, usage = None, Usage(0, 0)
        for piece in pieces:
            texts.append(piece.text)
            reasoning.append(piece.reasoning)
            scores += piece.logprobs
            finish_reason = piece.finish_reason or finish_reason
            usage = piece.usage or usage
        return cls("".join(texts), finish_reason, usage, tuple(scores), "".join(reasoning))


@dataclass(frozen=True, slots=True)
class ModelCard:
    """A model that is served."""

    id: str
    created: int
    """Unix seconds."""
    context_length: int
    """Most tokens of prompt and answer together."""
