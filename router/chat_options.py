"""How a conversation becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.errors import InvalidRequest
from router.openai_protocol import ChatCompletionRequest

_OURS = {"messages", "tools", "documents", "add_generation_prompt"}
"""Variables of the template that come from fields of their own."""


@dataclass(frozen=True, slots=True)
class ChatOptions:
    """What the client says of the template."""

    generation_prompt: bool = True
    """The template begins the assistant's turn."""
    continue_final: bool = False
    """The prompt ends with the last message's text: the answer goes on there."""
    variables: Mapping[str, Any] = field(default_factory=dict)
    """More variables; the template runs in a sandbox."""


def template_options(body: ChatCompletionRequest) -> ChatOptions:
    """Raises InvalidRequest."""
    continued = bool(body.continue_final_message)
    if continued and body.add_generation_prompt:
        raise InvalidRequest(
            "continue_final_message and add_generation_prompt exclude each other",
            param="continue_final_message",
        )
    variables = {} if body.chat_template_kwargs is None else body.chat_template_kwargs
    if not isinstance(variables, dict):
        raise InvalidRequest("chat_template_kwargs must be an object", param="chat_template_kwargs")
    begun = not continued and body.add_generation_prompt is not False
    return ChatOptions(begun, continued, checked_variables(variables, "chat_template_kwargs"))


def checked_variables(variables: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Raises InvalidRequest for one that comes from elsewhere."""
    if taken := sorted(_OURS & variables.keys()):
        raise InvalidRequest(
            f"{param} must not set {taken[0]}: it has a field of its own", param=param
        )
    return variables
