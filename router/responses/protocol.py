"""The supported request fields of ``POST /v1/responses``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from router.conversation.turns import MAX_MESSAGES
from router.http.client import Int
from router.openai.protocol import IGNORED, UNSERVED, SamplingFields

_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)]
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "messages": (),
    "prompt": (),
    # Fields of chat completions.
    "n": (1,),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
}
_IGNORED = frozenset(
    {
        *("background_options", "context_management", "image", "max_tool_calls"),
        *("top_logprobs", "truncation"),
    }
)
_CHECKED = frozenset({"include", "previous_response_id"})
"""Fields that the handler checks, in place of the general check of unsupported fields."""


class ResponsesRequest(SamplingFields):
    """The body of `POST /v1/responses`."""

    ignored = IGNORED | _IGNORED
    checked = _CHECKED
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSERVED, **_UNSERVED}

    input: str | _Objects
    """Text, or a list of items: messages, function calls and their outputs."""
    instructions: str | None = None
    """A system message that precedes all others."""
    max_output_tokens: Int | None = None
    """Maximum number of tokens to generate. Default: the rest of the context."""
    tools: _Objects | None = None
    """Up to 128 functions and custom tools that the model may call. Others are left out."""
    tool_choice: Any = Field(default=None, json_schema_extra={"type": ["string", "object", "null"]})
    """`none`, `auto` (the default), `required`, or the name of a function in OpenAI's form."""
    parallel_tool_calls: bool | None = None
    """Whether an answer may have several calls. Default true."""
    reasoning: dict[str, Any] | None = None
    """`effort`: `none`, `minimal`, `low`, `medium`, `high`, `xhigh` or `max`. A `summary` is never
    generated: the answer has the reasoning itself."""
    text: dict[str, Any] | None = None
    """`format`: `text`, `json_object` or `json_schema`."""
    metadata: dict[str, Any] | None = None
    """Returned unchanged. `agent` and `run_id` name the sender of the request, for usage and the
    request log."""
    stream_options: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """Ignored."""
    store: bool | None = None
    """Ignored: nothing is stored, and the answer has `store: false`."""
