"""Chat messages as a template takes them: a role, its text, and what it has to do with tools."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pydantic_core

from baton.errors import InvalidRequest, UnsupportedParameter
from router.openai.protocol import ContentPart, Message
from router.tool_calls.prompt import Turn
from router.tool_calls.tools import check_name

# `developer` is the newer name of the same thing; templates know the older one.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TOOL_ROLES = {"tool", "function"}


def openai_turns(messages: Sequence[Message]) -> list[Turn]:
    """Messages of the HTTP front. Raises InvalidRequest, UnsupportedParameter."""
    return _not_empty([_turn(one, f"messages[{place}]") for place, one in enumerate(messages)])


def _turn(message: Message, where: str) -> Turn:
    for name in ("function_call", "audio"):
        if getattr(message, name):
            raise UnsupportedParameter(f"{where}.{name} is not supported", param=f"{where}.{name}")
    if message.role == "tool":
        if not message.tool_call_id:
            name = f"{where}.tool_call_id"
            raise InvalidRequest(f"{name} is required", param=name)
        return result_turn(message.tool_call_id, _text(message.content, where))
    role = _role(message.role, where)
    if not message.tool_calls:
        return {"role": role, "content": _text(message.content, where)}
    if role != "assistant":
        name = f"{where}.tool_calls"
        raise InvalidRequest(f"{name}: only an assistant calls tools", param=name)
    for place, call in enumerate(message.tool_calls):
        check_name(call.function.name, f"{where}.tool_calls[{place}].function.name")
    content = "" if message.content is None else _text(message.content, where)
    functions = ((call.id, call.function) for call in message.tool_calls)
    return calls_turn(content, [(one, f.name, f.arguments) for one, f in functions])


def calls_turn(content: str, calls: Sequence[tuple[str, str, str]]) -> Turn:
    """An assistant's message with calls: their ids, names and arguments as JSON."""
    values = [
        {"id": name, "type": "function", "function": {"name": tool, "arguments": _value(given)}}
        for name, tool, given in calls
    ]
    # Some templates fail on a content that is null.
    return {"role": "assistant", "content": content, "tool_calls": values}


def result_turn(call_id: str, content: str) -> Turn:
    """What a call has given."""
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def _value(arguments: str) -> Any:
    """Templates write arguments as JSON themselves; what is none is passed on as text."""
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        return arguments
    return value if isinstance(value, dict) else arguments


def plain_turns(messages: Iterable[tuple[str, str]]) -> list[Turn]:
    """Pairs of role and text, of the gRPC front. Raises InvalidRequest, UnsupportedParameter."""
    return _not_empty(
        [
            {"role": _role(role, f"messages[{place}]"), "content": content}
            for place, (role, content) in enumerate(messages)
        ]
    )


def _not_empty(turns: list[Turn]) -> list[Turn]:
    if not turns:
        raise InvalidRequest("messages must not be empty", param="messages")
    return turns


def _role(role: str, where: str) -> str:
    if role in _TOOL_ROLES:
        raise UnsupportedParameter(
            f"{where}: role '{role}' is not supported here", param=f"{where}.role"
        )
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role must be system, developer, user, assistant or tool",
            param=f"{where}.role",
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
