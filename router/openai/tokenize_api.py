"""``/tokenize``, ``/detokenize`` (in vLLM's formats) and ``/v1/model/info``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from baton.errors import InvalidRequest
from router.dialects.tools import ToolDefinitions, tool_use
from router.http.client import Int, Ints, caller_of
from router.http.fields import RequestBody, validate
from router.http.json_stream import Items, JsonStream
from router.inference.service import InferenceService
from router.inference.tokens import TokenService
from router.openai.history import openai_turns
from router.openai.options import template_options
from router.openai.protocol import Messages


class _Body(RequestBody):
    model: str | None = None
    """The served model's id; optional."""


class TokenizeRequest(_Body):
    """The body of `POST /tokenize`: a prompt, or messages."""

    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "chat_template": (),
    }

    prompt: str | None = None
    """Text, as in `/v1/completions`."""
    messages: Messages | None = None
    """A conversation, as in `/v1/chat/completions`."""
    tools: ToolDefinitions | None = None
    """Tools of the conversation."""
    add_special_tokens: bool | None = None
    """Whether the tokenizer's special tokens are added. Default true for a prompt, and false for
    messages, whose template adds them."""
    add_generation_prompt: bool | None = None
    """With messages: whether the template begins the assistant's turn. Default true, except with
    `continue_final_message`."""
    continue_final_message: bool | None = None
    """With messages: the last message stays open. Default false."""
    chat_template_kwargs: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """With messages: more variables for the chat template."""
    return_token_strs: bool | None = None
    """Whether the tokens are also returned as text."""


class DetokenizeRequest(_Body):
    """The body of `POST /detokenize`."""

    tokens: Ints
    """Token ids."""


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    """Maximum tokens of prompt and answer together."""
    tokens: list[Int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class ModelInfo(BaseModel):
    """Facts of the served model."""

    model_config = ConfigDict(use_attribute_docstrings=True, from_attributes=True)

    id: str
    created: int
    """Creation time, in Unix seconds."""
    revision: str
    """The commit of its repository; empty if the model is a local folder or file."""
    max_model_len: int
    """Maximum tokens of prompt and answer together."""
    vocab_size: int
    """Size of the vocabulary: every token id is below this."""
    eos_token_ids: list[int]
    """Tokens that end an answer."""
    has_chat_template: bool
    tool_parser: str
    """The format in which tool calls are read; see `tool_parser` in the configuration."""
    model_name: str
    """Alias of `id`."""
    quantization: str | None
    """Quantization of the weights: int8, int4 or fp8; null: not quantized."""
    dtype: str
    """Type of the weights that are not quantized."""
    kv_dtype: str
    """Type of the KV cache."""
    batch_size: int
    """Maximum sequences that a decode worker computes in one step."""
    max_sequence_length: int
    """Alias of `max_model_len`."""
    fingerprint: str
    """Hash of all that decides the KV: weights, tokenizer, KV type. Empty while no worker is known.
    """


class TokenizeApi:
    """The handlers of ``/tokenize``, ``/detokenize`` and ``/v1/model/info``. They raise BatonError,
    which ``router.http.errors`` converts to a response."""

    def __init__(self, service: InferenceService, tokens: TokenService) -> None:
        self._service = service
        self._tokens = tokens

    async def tokenize(self, request: Request) -> Response:
        """Convert text or messages to token ids."""
        tenant = caller_of(request).principal.tenant
        async with self._service.bodies.object(request, tenant) as raw:
            body = validate(TokenizeRequest, raw, self._service.fields)
            self._tokens.check_model(body.model)
            ids = await self._ids(body, tenant)
        return JsonStream(
            {
                "count": len(ids),
                "max_model_len": self._tokens.context_length,
                "tokens": Items(ids),
                "token_strs": Items(map(self._tokens.spelling, ids))
                if body.return_token_strs
                else None,
            }
        )

    async def detokenize(self, request: Request) -> Response:
        """Convert token ids to text, with special tokens."""
        tenant = caller_of(request).principal.tenant
        async with self._service.bodies.object(request, tenant) as raw:
            body = validate(DetokenizeRequest, raw, self._service.fields)
            self._tokens.check_model(body.model)
            text = await self._tokens.text(body.tokens, "tokens", tenant)
        return JSONResponse(Detokenized(prompt=text).model_dump())

    async def model_info(self) -> ModelInfo:
        """Describe the served model."""
        return ModelInfo.model_validate(self._tokens.facts())

    async def _ids(self, body: TokenizeRequest, tenant: str) -> tuple[int, ...]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("give either prompt or messages", param="prompt")
        if body.messages is not None:
            tools = tool_use(body.tools, None, parallel=None)
            ending, variables = template_options(body)
            return await self._tokens.ids_of_turns(
                openai_turns(body.messages),
                tools,
                tenant,
                ending=ending,
                variables=variables,
                special=bool(body.add_special_tokens),
            )
        special = body.add_special_tokens is not False
        return await self._tokens.ids_of_text(body.prompt or "", tenant, special=special)
