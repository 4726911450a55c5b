"""How a conversation becomes a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from baton.errors import InvalidRequest

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


def checked_variables(variables: Mapping[str, Any], param: str) -> Mapping[str, Any]:
    """Raises InvalidRequest for one that comes from elsewhere."""
    if taken := sorted(_OURS & variables.keys()):
        raise InvalidRequest(
            f"{param} must not set {taken[0]}: it has a field of its own", param=param
        )
    return variables
