"""Gives every API the tokenizer and the properties of the served model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from router.conversation.turns import Turn
from router.dialects.tools import ToolUse
from router.inference.prompt import Ending
from router.inference.service import InferenceService

_KINDS = ("int8", "int4", "fp8")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """The properties of the served model that APIs report."""

    id: str
    created: int
    """Unix time in seconds at which this router read the model. Clients get it as the creation
    time."""
    revision: str
    """The commit of the model's repository; empty if the model is a local folder or file."""
    max_model_len: int
    """Maximum number of tokens of prompt and answer together."""
    vocab_size: int
    """Size of the vocabulary: every token id is below this."""
    eos_token_ids: tuple[int, ...]
    """Token ids that end an answer."""
    has_chat_template: bool
    tool_parser: str
    """Name of the parser that reads tool calls from answers, as `tool_parser` in the
    configuration."""
    quantization: str | None
    """Quantization of the weights: int8, int4 or fp8. None means that the weights are not
    quantized."""
    dtype: str
    """Type of the weights that are not quantized."""
    kv_dtype: str
    """Type of the KV cache."""
    batch_size: int
    """Maximum number of sequences that a decode worker computes in one step."""
    fingerprint: str
    """Hash of everything that affects the contents of the KV cache: weights, tokenizer, KV type.
    Empty while no worker is known."""

    @property
    def model_name(self) -> str:
        """The model's id, under the name that one API uses for it."""
        return self.id

    @property
    def max_sequence_length(self) -> int:
        """The value of ``max_model_len``, under the name that one API uses for it."""
        return self.max_model_len


class TokenService:
    """Tokenizes and detokenizes for APIs, and reports the model's properties.

    Owned by the event loop; texts are tokenized on threads. Raises BatonError.
    """

    def __init__(self, service: InferenceService) -> None:
        self._builder = service.builder
        self._tokenizer = service.tokenizer
        self._model = service.model
        self._config = service.config
        self._records = service.worker_records

    @property
    def context_length(self) -> int:
        """Maximum number of tokens of prompt and answer together."""
        return self._builder.context_length

    def check_model(self, model_id: str | None) -> None:
        """Check a model name that a client gave; None is allowed. Raises ModelNotFound."""
        if model_id:
            self._builder.check_model(model_id)

    async def ids_of_text(self, text: str, tenant: str, *, special: bool) -> tuple[int, ...]:
        """Tokenize a text. ``special``: true if the tokenizer's special tokens are added. Raises
        InvalidRequest.
        """
        return await self._builder.encoder.text_ids(tenant, text, special=special)

    async def ids_of_turns(
        self,
        turns: Sequence[Turn],
        tools: ToolUse | None,
        tenant: str,
        *,
        ending: Ending = "answer",
        variables: Mapping[str, Any] = MappingProxyType({}),
        special: bool = False,
    ) -> tuple[int, ...]:
        """Return the token ids of a conversation, as ``PromptEncoder.chat_ids`` does. Raises
        InvalidRequest."""
        return await self._builder.encoder.chat_ids(
            tenant, turns, tools, ending=ending, variables=variables, special=special
        )

    def spelling(self, token_id: int) -> str:
        """Return the text of a token as the vocabulary spells it."""
        return self._tokenizer.spell(token_id)

    async def text(self, token_ids: Sequence[int], param: str, tenant: str) -> str:
        """Return the text of token ids, including special tokens. Raises InvalidRequest."""
        return await self._builder.encoder.text_of(tenant, token_ids, param)

    def facts(self) -> ModelFacts:
        """Return the model's properties as decode workers report them. Without workers, return
        those in the configuration."""
        config = self._config
        pools = [pool for pool in config.pools if pool.role == "decode"]
        records = [one for one in self._records() if one.role == "decode"]
        # During a rollout, show the model that most decode workers run.
        counted = Counter(one.fingerprint for one in records).most_common(1)
        shown = next((one for one in records if one.fingerprint == counted[0][0]), None)
        asked = config.quantization if config.quantization in _KINDS else None
        return ModelFacts(
            id=self._model.id,
            created=self._model.created,
            revision=self._model.revision,
            max_model_len=self.context_length,
            vocab_size=self._tokenizer.vocab_size,
            eos_token_ids=tuple(sorted(self._tokenizer.eos_ids)),
            has_chat_template=self._tokenizer.has_chat_template,
            tool_parser=self._builder.dialect.tools.name,
            quantization=asked if shown is None else shown.quantization or None,
            dtype=config.dtype if shown is None else shown.dtype,
            kv_dtype=config.lossiest_kv_dtype if shown is None else shown.geometry.kv_dtype,
            batch_size=max(one.max_sequences for one in records or pools),
            fingerprint="" if shown is None else shown.fingerprint,
        )
