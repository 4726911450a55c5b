"""The served model's tokenizer and facts, for every API."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.dialects.tools import ToolUse
from router.inference.prompt import Turn
from router.inference.service import InferenceService


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the router knows of the served model."""

    id: str
    created: int
    """Unix seconds."""
    revision: str
    """The commit of its repository; empty: the model is a folder or a file of the operator."""
    max_model_len: int
    """Most tokens of prompt and answer together."""
    vocab_size: int
    """Token ids are below this."""
    eos_token_ids: tuple[int, ...]
    """Tokens that end an answer."""
    has_chat_template: bool
    tool_parser: str
    """How tool calls are read; see `tool_parser` in the configuration."""


class TokenService:
    """Owned by the event loop; texts are tokenized on threads. Raises BatonError."""

    def __init__(self, service: InferenceService) -> None:
        self._builder = service.builder
        self._tokenizer = service.tokenizer
        self._model = service.model

    @property
    def context_length(self) -> int:
        """Most tokens of prompt and answer together."""
        return self._builder.context_length

    def check_model(self, model_id: str | None) -> None:
        """The model may be left out. Raises ModelNotFound."""
        if model_id:
            self._builder.check_model(model_id)

    async def ids_of_text(self, text: str, tenant: str, *, special: bool) -> tuple[int, ...]:
        """``special``: with the special tokens that the tokenizer adds. Raises InvalidRequest."""
        return await self._builder.encoder.text_ids(tenant, text, special=special)

    async def ids_of_turns(
        self, turns: Sequence[Turn], tools: ToolUse | None, tenant: str
    ) -> tuple[int, ...]:
        """A conversation, ready for the answer. Raises InvalidRequest."""
        return await self._builder.encoder.chat_ids(tenant, turns, tools)

    def spelling(self, token_id: int) -> str:
        """A token as the vocabulary writes it."""
        return self._tokenizer.spell(token_id)

    async def text(self, token_ids: Sequence[int], param: str, tenant: str) -> str:
        """Special tokens included. Raises InvalidRequest."""
        return await self._builder.encoder.text_of(tenant, token_ids, param)

    def facts(self) -> ModelFacts:
        return ModelFacts(
            id=self._model.id,
            created=self._model.created,
            revision=self._model.revision,
            max_model_len=self.context_length,
            vocab_size=self._tokenizer.vocab_size,
            eos_token_ids=tuple(sorted(self._tokenizer.eos_ids)),
            has_chat_template=self._tokenizer.has_chat_template,
            tool_parser=self._builder.dialect.tools.name,
        )
