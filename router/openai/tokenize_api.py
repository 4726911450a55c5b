"""``/tokenize``, ``/detokenize`` (in vLLM's shapes) and ``/v1/model/info``."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import JSONResponse, Response

from baton.errors import InvalidRequest
from router.http.client import Int, Ints, read_object, validate
from router.inference.service import InferenceService
from router.inference.tokens import TokenService
from router.openai.api import openai_turns
from router.openai.protocol import Message
from router.tool_calls.tools import ToolDefinitions, tool_use


class _Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    model: str | None = None
    """The served model's id; may be left out."""


class TokenizeRequest(_Body):
    """The body of `POST /tokenize`: a prompt, or messages."""

    prompt: str | None = None
    """Text, as `/v1/completions` takes it."""
    messages: Annotated[list[Message], Field(fail_fast=True)] | None = None
    """A conversation, as `/v1/chat/completions` takes it."""
    tools: ToolDefinitions | None = None
    """Tools of the conversation."""
    add_special_tokens: bool | None = None
    """Whether a prompt gets the special tokens that the tokenizer adds. Default true."""
    return_token_strs: bool | None = None
    """Whether the tokens are also given as text."""


class DetokenizeRequest(_Body):
    """The body of `POST /detokenize`."""

    tokens: Ints
    """Token ids."""


class Tokenized(BaseModel):
    count: int
    max_model_len: int
    """Most tokens of prompt and answer together."""
    tokens: list[Int]
    token_strs: list[str] | None = None


class Detokenized(BaseModel):
    prompt: str


class ModelInfo(BaseModel):
    """What the router knows of the served model."""

    model_config = ConfigDict(use_attribute_docstrings=True, from_attributes=True)

    id: str
    created: int
    """Unix seconds."""
    revision: str
    """The commit of its repository; empty: the model is a folder or a file of the operator."""
    max_model_len: int
    """Most tokens of prompt and answer together."""
    vocab_size: int
    """Token ids are below this."""
    eos_token_ids: list[int]
    """Tokens that end an answer."""
    has_chat_template: bool
    tool_parser: str
    """How tool calls are read; see `tool_parser` in the configuration."""


class TokenizeApi:
    """The handlers. They raise BatonError; ``router.http.errors`` answers it."""

    def __init__(self, service: InferenceService, tokens: TokenService) -> None:
        self._service = service
        self._tokens = tokens

    async def tokenize(self, request: Request) -> Response:
        """Text or messages to token ids."""
        self._service.access.caller(request.headers)
        body = validate(TokenizeRequest, await self._read(request))
        self._tokens.check_model(body.model)
        ids = await self._ids(body)
        answer = Tokenized(
            count=len(ids),
            max_model_len=self._tokens.context_length,
            tokens=list(ids),
            token_strs=self._tokens.spellings(ids) if body.return_token_strs else None,
        )
        return JSONResponse(answer.model_dump())

    async def detokenize(self, request: Request) -> Response:
        """Token ids to text, special tokens included."""
        self._service.access.caller(request.headers)
        body = validate(DetokenizeRequest, await self._read(request))
        self._tokens.check_model(body.model)
        text = await self._tokens.text(tuple(body.tokens), "tokens")
        return JSONResponse(Detokenized(prompt=text).model_dump())

    async def model_info(self, request: Request) -> ModelInfo:
        """Describe the served model."""
        self._service.access.caller(request.headers)
        return ModelInfo.model_validate(self._tokens.facts())

    async def _read(self, request: Request) -> dict[str, Any]:
        config = self._service.config
        return await read_object(request, config.max_body_bytes, config.request_deadline_s)

    async def _ids(self, body: TokenizeRequest) -> tuple[int, ...]:
        if (body.prompt is None) == (body.messages is None):
            raise InvalidRequest("one of prompt and messages is required", param="prompt")
        if body.messages is not None:
            tools = tool_use(body.tools, None, parallel=None)
            return await self._tokens.ids_of_turns(openai_turns(body.messages), tools)
        special = body.add_special_tokens is not False
        return await self._tokens.ids_of_text(body.prompt or "", special=special)
