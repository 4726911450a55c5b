"""The supported request fields of ``POST /v1/messages``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from router.http.client import Int, RequestBody, Strings
from router.inference.prompt import MAX_MESSAGES

_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)]

_IGNORED = frozenset({"betas", "inference_geo", "metadata", "service_tier"})
_OF_ANSWERS = frozenset(
    {
        *("cache_control", "max_tokens", "stop_sequences", "stream"),
        *("temperature", "top_k", "top_p"),
    }
)
"""Fields of `/v1/messages` that do not affect the token count of a prompt."""


class MessageInput(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    role: str
    """`user` or `assistant`."""
    content: str | _Objects
    """Text, or a list of blocks: text, thinking, tool calls and their results."""


class CountTokensRequest(RequestBody):
    """The body of `POST /v1/messages/count_tokens`."""

    ignored = _IGNORED | _OF_ANSWERS
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "container": ("",),
        "context_management": ({},),
        "mcp_servers": ([],),
        "output_config": ({},),
        "output_format": ({},),
    }

    model: str
    """The served model's id; see `GET /v1/models`."""
    messages: Annotated[list[MessageInput], Field(fail_fast=True, max_length=MAX_MESSAGES)]
    """The conversation. The answer continues a last message of the assistant."""
    system: str | _Objects | None = None
    """The system message."""
    tools: _Objects | None = None
    """Up to 128 tools that the model may call."""
    tool_choice: dict[str, Any] | None = None
    """`type`: `auto` (the default), `any`, `tool` with a `name`, or `none`."""
    thinking: dict[str, Any] | None = None
    """`type`: `enabled`, with `budget_tokens` below `max_tokens`; `adaptive`; or `disabled`.
    Default: that of the model's chat template."""


class MessagesRequest(CountTokensRequest):
    """The body of `POST /v1/messages`."""

    max_tokens: Int
    """Maximum number of tokens to generate."""
    cache_control: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """`{"type": "ephemeral"}`, with a `ttl` of `5m` (the default) or `1h`: keeps the whole prompt
    cached for that time. Blocks and tools may have the same field, at most four in all."""
    stop_sequences: Strings | None = None
    """Up to 16 strings that end the answer and are not part of it."""
    stream: bool | None = None
    """Send the answer as server-sent events while it is generated."""
    temperature: float | None = None
    """0 … 2; 0 takes the most likely token. Default 1."""
    top_p: float | None = None
    """Above 0, at most 1: keep the smallest set of tokens with this probability. Default 1."""
    top_k: Int | None = None
    """Keep this many of the most likely tokens."""
    seed: Int | None = None
    """Any 64-bit integer; same seed, same tokens (extension)."""
    priority: Int | None = None
    """A 32-bit integer: waiting requests with lower values go first (extension)."""
