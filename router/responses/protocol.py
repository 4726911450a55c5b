"""The request of ``POST /v1/responses``, as far as it is served."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

from pydantic import Field

from router.http.client import Int
from router.inference.prompt import MAX_MESSAGES
from router.openai.protocol import IGNORED, UNSERVED, SamplingFields

_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True, max_length=MAX_MESSAGES)]
_UNSERVED: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "prompt": (),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "context_management": ([],),
    "moderation": (),
    # Of chat completions.
    "n": (1,),
    "logprobs": (False,),
    "prompt_logprobs": (),
    "return_token_ids": (False,),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "bad_words": ([],),
}
_IGNORED = frozenset({"max_tool_calls"})
_CHECKED = frozenset({"include", "previous_response_id"})
"""Fields with a check of their own."""


class ResponsesRequest(SamplingFields):
    """The body of `POST /v1/responses`."""

    ignored = IGNORED | _IGNORED | _CHECKED
    unserved: ClassVar[Mapping[str, tuple[Any, ...]]] = {**UNSERVED, **_UNSERVED}

    input: str | _Objects
    """Text, or a list of items: messages, function calls and their outputs."""
    instructions: str | None = None
    """A system message that goes before all others."""
    max_output_tokens: Int | None = None
    """Most tokens to generate. Default: what is left of the context."""
    tools: _Objects | None = None
    """Up to 128 functions that the model may call."""
    tool_choice: Any = Field(default=None, json_schema_extra={"type": ["string", "object", "null"]})
    """`none`, `auto` (the default), `required`, or the name of a function in OpenAI's form."""
    parallel_tool_calls: bool | None = None
    """Whether there may be several calls in an answer. Default true."""
    reasoning: dict[str, Any] | None = None
    """`effort`: `none`, `minimal`, `low`, `medium` or `high`. A `summary` is never made: the answer
    has the reasoning itself."""
    text: dict[str, Any] | None = None
    """`format`: `text`, `json_object` or `json_schema`."""
    metadata: dict[str, Any] | None = None
    """Given back as it is. `agent` and `run_id` name what sends the request, for usage and the
    request log."""
    stream_options: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """Nothing of it is served; ignored."""
    store: bool | None = None
    """Ignored: nothing is stored, and the answer has `false`."""
