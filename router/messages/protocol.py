"""The supported request fields of ``POST /v1/messages``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, ConfigDict, Field

from router.conversation.turns import MAX_MESSAGES
from router.http.client import Int, Strings
from router.http.fields import RequestBody

_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)]

_IGNORED = frozenset(
    {
        *("betas", "billing_policy", "container", "context_management", "diagnostics"),
        *("fallback_credit_token", "fallbacks", "inference_geo", "mcp_servers", "metadata"),
        *("service_tier", "speed", "user_profile_id", "workspace_id"),
    }
)
"""Fields that clients of Anthropic send, and that do not change the answer here. What Anthropic's
servers run, such as an MCP server's tools, the model does not see."""
_OF_ANSWERS = frozenset(
    {
        *("cache_control", "max_tokens", "stop_sequences", "stream"),
        *("compaction", "temperature", "thread", "top_k", "top_p"),
    }
)
"""Fields of `/v1/messages` that do not affect the token count of a prompt."""


class MessageInput(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    role: str
    """`user`, `assistant` or `system`."""
    content: str | _Objects | None
    """Text, or a list of blocks: text, documents of text, thinking, tool calls and results."""


class CountTokensRequest(RequestBody):
    """The body of `POST /v1/messages/count_tokens`."""

    ignored = _IGNORED | _OF_ANSWERS

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
    output_config: dict[str, Any] | None = None
    """`effort`: `low`, `medium`, `high`, `xhigh` or `max`; `format`: `{"type": "json_schema",
    "schema": …}`. The effort of a model without efforts is a budget of reasoning tokens."""
    output_format: dict[str, Any] | None = None
    """An older name for `output_config.format`."""
    thinking: dict[str, Any] | None = None
    """`type`: `enabled`, with `budget_tokens` below `max_tokens`; `adaptive`; or `disabled`.
    Default: that of the model's chat template."""


class MessagesRequest(CountTokensRequest):
    """The body of `POST /v1/messages`."""

    ignored = _IGNORED
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        # A summary in place of an answer; and messages that another server keeps.
        "compaction": (),
        "thread": ({"type": "create"},),
    }

    max_tokens: Int
    """Maximum number of tokens to generate. More than the context has room for is cut to that; then
    `stop_reason` is `model_context_window_exceeded`."""
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
