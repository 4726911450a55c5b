"""Chat messages as a template takes them: a role and its text."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from baton.errors import InvalidRequest, UnsupportedParameter
from router.openai_protocol import ContentPart, Message

# `developer` is the newer name of the same thing; templates know the older one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TOOL_ROLES = {"tool", "function"}


def openai_turns(messages: Sequence[Message]) -> list[dict[str, str]]:
    """Messages of the HTTP front. Raises InvalidRequest, UnsupportedParameter."""
    turns = []
    for place, message in enumerate(messages):
        where = f"messages[{place}]"
        for name in ("tool_calls", "function_call", "audio"):
            if getattr(message, name):
                raise UnsupportedParameter(
                    f"{where}.{name} is not supported", param=f"{where}.{name}"
                )
        role = _role(message.role, where)
        turns.append({"role": role, "content": _text(message.content, where)})
    return _not_empty(turns)


def plain_turns(messages: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """Pairs of role and text, of the gRPC front. Raises InvalidRequest, UnsupportedParameter."""
    return _not_empty(
        [
            {"role": _role(role, f"messages[{place}]"), "content": content}
            for place, (role, content) in enumerate(messages)
        ]
    )


def _not_empty(turns: list[dict[str, str]]) -> list[dict[str, str]]:
    if not turns:
        raise InvalidRequest("messages must not be empty", param="messages")
    return turns


def _role(role: str, where: str) -> str:
    if role in _TOOL_ROLES:
        raise UnsupportedParameter(
            f"{where}: tools are not supported, so neither is role '{role}'", param=f"{where}.role"
        )
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role must be system, developer, user or assistant", param=f"{where}.role"
        )
    return _ROLES[role]


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if isinstance(content, str):
        return content
    if content is None:
        raise InvalidRequest(f"{where}.content must not be null", param=f"{where}.content")
    return "\n".join(_part(part, f"{where}.content[{i}]") for i, part in enumerate(content))


def _part(part: ContentPart, where: str) -> str:
    if part.type != "text":
        raise UnsupportedParameter(f"{where}: only text parts are supported", param=where)
    if part.text is None:
        raise InvalidRequest(f"{where}.text is missing", param=f"{where}.text")
    return part.text
