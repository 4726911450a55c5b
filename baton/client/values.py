"""Arguments and results of the gRPC clients."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from baton.grammar import Grammar


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation."""

    role: str
    """Role of the turn's author: ``system``, ``user`` or ``assistant``."""
    content: str


@dataclass(frozen=True, slots=True)
class Sampling:
    """Sampling parameters. The server chooses those that are None, and checks the ranges."""

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
    """The only token ids that may be sampled; empty: all token ids."""
    grammar: Grammar | None = None
    """Grammar that the answer's text must match."""
    logprobs: int | None = None
    """Number of most likely tokens to return with each token's log probability; None: no log
    probabilities."""

    def given(self) -> dict[str, Any]:
        """Return the sampling parameters that are set, by name. None and empty values count as not
        set."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, (), {})}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request."""

    prompt_tokens: int
    completion_tokens: int
    cached_prompt_tokens: int = 0
    """Prompt tokens whose KV was found in a cache."""
    written_prompt_tokens: int = 0
    """Prompt tokens that were computed and stay cached for longer because of a pin."""
    reasoning_tokens: int = 0
    """Number of reasoning tokens, which are part of ``completion_tokens``."""


@dataclass(frozen=True, slots=True)
class TokenScore:
    """A token, and the natural logarithm of its probability by the raw logits."""

    text: bytes
    """The token's bytes, which may be half a character."""
    logprob: float
    top: tuple[tuple[bytes, float], ...] = ()
    """The most likely tokens at this position, most likely first."""


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of an answer that arrived since the last piece."""

    text: str
    finish_reason: str | None = None
    """Reason why the answer ended: ``stop`` or ``length``; None until the answer has ended."""
    usage: Usage | None = None
    """Token counts of the request; None except in the last piece."""
    logprobs: tuple[TokenScore, ...] = ()
    """Log probabilities, if the request asked for them."""
    reasoning: str = ""
    """The reasoning of a chat's answer, which comes before its text."""


@dataclass(frozen=True, slots=True)
class Answer:
    """A complete answer."""

    text: str
    finish_reason: str | None
    usage: Usage
    logprobs: tuple[TokenScore, ...] = ()
    """Log probabilities, if the request asked for them."""
    reasoning: str = ""
    """The model's reasoning before the answer, in a chat."""

    @classmethod
    def of(cls, pieces: Iterable[Piece]) -> Answer:
        """Join the pieces of a stream to a complete answer."""
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
    """Creation time in Unix seconds."""
    context_length: int
    """Maximum number of tokens of prompt and answer together."""
