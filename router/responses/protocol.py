"""The request of ``POST /v1/responses``, as far as it is served. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from router.http.client import Int
from router.openai.protocol import SamplingFields

_Objects = Annotated[list[dict[str, Any]], Field(fail_fast=True)]


class ResponsesRequest(SamplingFields):
    """The body of `POST /v1/responses`."""

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
    text: dict[str, Any] | None = None
    """`format`: `text`, `json_object` or `json_schema`."""
    metadata: dict[str, Any] | None = None
    """Given back as it is."""
    stream_options: Any = Field(default=None, json_schema_extra={"type": ["object", "null"]})
    """Nothing of it is served; ignored."""
    store: bool | None = None
    """Nothing is ever stored, whatever is asked for: the answer says so."""
