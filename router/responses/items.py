"""The input of ``/v1/responses``: converts items to the messages that a chat template takes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest, UnsupportedParameter
from router.dialects.tools import MAX_CALLS, check_name
from router.inference.prompt import Turn, calls_turn, result_turn, with_reasoning

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_TEXT_PARTS = {"input_text", "output_text", "text"}


def response_turns(
    given: str | Sequence[Mapping[str, Any]], instructions: str | None
) -> list[Turn]:
    """Convert the fields ``input`` and ``instructions`` of a body to turns. Raises InvalidRequest
    and UnsupportedParameter."""
    turns: list[Turn] = []
    if instructions:
        turns.append({"role": "system", "content": instructions})
    if isinstance(given, str):
        return [*turns, {"role": "user", "content": given}]
    if not given:
        raise InvalidRequest("input must not be empty", param="input")
    reasoning = ""
    for place, item in enumerate(given):
        where = f"input[{place}]"
        if item.get("type") == "reasoning":
            reasoning = _reasoning(item, where)
            continue
        _add(turns, item, where)
        if reasoning and turns[-1]["role"] == "assistant":
            turns[-1] = with_reasoning(turns[-1], reasoning)
        reasoning = ""
    if not any(turn["role"] != "system" for turn in turns):
        raise InvalidRequest("input has no message", param="input")
    return turns


def _add(turns: list[Turn], item: Mapping[str, Any], where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        turns.append(_message(item, where))
    elif kind == "function_call":
        _add_call(turns, item, where)
    elif kind == "function_call_output":
        call_id = _string(item, "call_id", where)
        turns.append(result_turn(call_id, text_of(item.get("output"), f"{where}.output")))
    elif kind == "item_reference":
        raise UnsupportedParameter(
            f"{where}: items are not stored; send the item itself", param=where
        )
    else:
        raise UnsupportedParameter(f"{where}: items of this type are not supported", param=where)


def _reasoning(item: Mapping[str, Any], where: str) -> str:
    """Return the text of a reasoning item of an earlier answer; empty if another server has
    encrypted the text."""
    content = item.get("content")
    if content is None:
        return ""
    if not isinstance(content, list) or not all(isinstance(part, dict) for part in content):
        raise InvalidRequest(f"{where}.content must be a list of objects", param=f"{where}.content")
    return "\n".join(
        _string(part, "text", f"{where}.content[{place}]") for place, part in enumerate(content)
    )


def _message(item: Mapping[str, Any], where: str) -> Turn:
    role = _string(item, "role", where)
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role must be system, developer, user or assistant", param=f"{where}.role"
        )
    return {"role": _ROLES[role], "content": text_of(item.get("content"), f"{where}.content")}


def _add_call(turns: list[Turn], item: Mapping[str, Any], where: str) -> None:
    """Add a function call to the assistant's last message. One message then has all calls of an
    answer, and the text before the calls."""
    name = _string(item, "name", where)
    check_name(name, f"{where}.name")
    arguments = _string(item, "arguments", where)
    turn = calls_turn("", [(_string(item, "call_id", where), name, arguments)])
    last = turns[-1] if turns else None
    if last is not None and last["role"] == "assistant":
        calls = [*last.get("tool_calls", ()), *turn["tool_calls"]]
        if len(calls) > MAX_CALLS:
            raise InvalidRequest(
                f"{where}: at most {MAX_CALLS} calls follow each other", param=where
            )
        turns[-1] = {**last, "tool_calls": calls}
    else:
        turns.append(turn)


def _string(item: Mapping[str, Any], name: str, where: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value


def text_of(content: Any, where: str) -> str:
    """Return the text of an item's content, which is text or a list of parts with text. ``where``
    is its path, for errors. Raises InvalidRequest and UnsupportedParameter."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{where} must be a string or a list of text parts", param=where)
    return "\n".join(_part(part, f"{where}[{place}]") for place, part in enumerate(content))


def _part(part: Any, where: str) -> str:
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    kind = part["type"]
    if kind == "refusal":
        return _string(part, "refusal", where)
    if kind not in _TEXT_PARTS:
        raise UnsupportedParameter(f"{where}: only text is supported", param=where)
    return _string(part, "text", where)
