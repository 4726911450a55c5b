"""The bodies of ``/v1/cache/prefixes``."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict

from router.dialects.tools import ToolDefinitions
from router.http.client import Int, Ints
from router.http.fields import RequestBody
from router.openai.protocol import Messages

MAX_NAME_CHARACTERS = 64
DEFAULT_TTL_S = 300


class PinRequest(RequestBody):
    """The body of `POST /v1/cache/prefixes`: a prompt, or messages."""

    model: str | None = None
    """The served model's id; optional."""
    prompt: str | Ints | None = None
    """Text or token ids, as in `/v1/completions`."""
    messages: Messages | None = None
    """The beginning of a conversation, as in `/v1/chat/completions`."""
    tools: ToolDefinitions | None = None
    """Tools of the conversation."""
    ttl: Int | None = None
    """Seconds until the pin ends: 1 … 86400. Default 300."""
    name: str | None = None
    """A name for lists of pins, up to 64 characters."""


class PinnedPrefix(BaseModel):
    """A prefix whose blocks are kept until the pin expires."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    id: str
    object: Literal["cache.prefix"] = "cache.prefix"
    name: str
    tokens: int
    """Number of tokens of the prefix."""
    pinned_tokens: int
    """Number of tokens in its full blocks, which are pinned."""
    created_at: int
    """Creation time, in Unix seconds."""
    expires_at: int
    """End of the pin, in Unix seconds."""


class PrefixUsage(BaseModel):
    """The tokens that were processed to pin a prefix."""

    model_config = ConfigDict(use_attribute_docstrings=True)

    prompt_tokens: int
    cached_tokens: int
    """Tokens whose KV was found in a cache."""
    cache_write_tokens: int
    """Tokens whose KV was computed and is kept."""


class PinAnswer(PinnedPrefix):
    """The answer of `POST /v1/cache/prefixes`."""

    usage: PrefixUsage


class PrefixList(BaseModel):
    """The answer of `GET /v1/cache/prefixes`."""

    object: Literal["list"] = "list"
    data: list[PinnedPrefix]


class PrefixDeleted(BaseModel):
    """The answer of `DELETE /v1/cache/prefixes/{id}`."""

    id: str
    object: Literal["cache.prefix.deleted"] = "cache.prefix.deleted"
    deleted: bool = True
