"""The input of ``/v1/responses``: converts items to turns.

Items of hosted tools are those of another server's answers. With their results they are calls like
others; without, they say nothing to the model and are left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest, UnsupportedParameter
from router.conversation.content import string, text_of
from router.conversation.turns import (
    Turn,
    arguments_text,
    begin_of_current_turn,
    calls_turn,
    checked_called_name,
    joined_calls,
    result_turn,
    text_turn,
    with_reasoning,
)
from router.dialects.tools import MAX_CALLS

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ARGUMENTS = ("arguments", "input", "action", "operation", "queries", "code", "prompt")
"""Fields of calls that say what was called for, the most usual first."""
_RESULTS = ("output", "outputs", "results", "result", "error")
"""Fields of hosted calls that hold their result."""
_SILENT = frozenset(
    {
        *("additional_tools", "compaction", "compaction_trigger", "context_compaction"),
        *("mcp_list_tools", "mcp_approval_request", "mcp_approval_response"),
        *("program", "program_output", "tool_search_output"),
    }
)
"""Types of items that say nothing to the model."""
_MAX_RESULT_CHARACTERS = 1 << 20

Item = Mapping[str, Any]


def response_turns(given: str | Sequence[Item], instructions: str | None) -> list[Turn]:
    """Convert the fields ``input`` and ``instructions`` of a body to turns. Raises InvalidRequest
    and UnsupportedParameter."""
    turns = [text_turn("system", instructions)] if instructions else []
    if isinstance(given, str):
        return [*turns, text_turn("user", given)]
    if not given:
        raise InvalidRequest("input must not be empty", param="input")
    history = _History(turns, given)
    for place, item in enumerate(given):
        history.add(item, f"input[{place}]", current=place >= history.begin)
    if not any(turn["role"] != "system" for turn in turns):
        raise InvalidRequest("input has no message", param="input")
    return turns


class _History:
    """Turns, and the reasoning that precedes the next answer."""

    def __init__(self, turns: list[Turn], items: Sequence[Item]) -> None:
        self._turns = turns
        self._reasoning = ""
        self._answered = {
            one for item in items if _kind(item).endswith("_output") and (one := _id_of(item))
        }
        """Ids of the calls whose results are items of their own."""
        self.begin = begin_of_current_turn([_is_answer(item) for item in items])
        """The place of the first item that the model answers now."""

    def add(self, item: Item, where: str, *, current: bool) -> None:
        """Add an item. Raises InvalidRequest and UnsupportedParameter."""
        kind = _kind(item)
        if kind == "reasoning":
            self._reasoning = _reasoning(item, where)
            return
        if kind == "message":
            self._turns.append(_message(item, where, current=current))
        elif kind.endswith("_output") and kind not in _SILENT:
            self._turns.append(self._result(item, where, current=current))
        elif kind in ("function_call", "custom_tool_call"):
            self._add_call(string(item, "call_id", where), item, kind, where)
        elif kind.endswith("_call"):
            self._add_hosted(item, kind, where)
        elif kind == "item_reference":
            raise UnsupportedParameter(
                f"{where}: items are not stored; send the item itself", param=where
            )
        elif current and kind not in _SILENT:
            raise UnsupportedParameter(
                f"{where}: items of the type '{kind[:64]}' are not supported", param=where
            )
        else:
            return
        if self._reasoning and self._turns and self._turns[-1]["role"] == "assistant":
            self._turns[-1] = with_reasoning(self._turns[-1], self._reasoning)
        self._reasoning = ""

    def _result(self, item: Item, where: str, *, current: bool) -> Turn:
        found = _id_of(item)
        if not found:
            raise InvalidRequest(f"{where}.call_id must be a string", param=f"{where}.call_id")
        return result_turn(found, _output(item.get("output"), f"{where}.output", current=current))

    def _add_hosted(self, item: Item, kind: str, where: str) -> None:
        """Add the call of a hosted tool, if its result is known."""
        call_id = _id_of(item)
        inner = next((item[name] for name in _RESULTS if item.get(name) is not None), None)
        if call_id in self._answered or inner is not None:
            self._add_call(call_id or where, item, kind, where)
        if call_id not in self._answered and inner is not None:
            result = _output(inner, where, current=False)
            self._turns.append(result_turn(call_id or where, result))

    def _add_call(self, call_id: str, item: Item, kind: str, where: str) -> None:
        name = item.get("name", kind.removesuffix("_call"))
        name = checked_called_name(name, f"{where}.name")
        given = next((item[one] for one in _ARGUMENTS if item.get(one) is not None), None)
        if kind == "custom_tool_call":
            given = {"input": string(item, "input", where)}
        elif kind == "function_call" and not isinstance(given, dict):
            given = string(item, "arguments", where)
        joined_calls(self._turns, calls_turn("", [(call_id, name, arguments_text(given))]))
        if len(self._turns[-1]["tool_calls"]) > MAX_CALLS:
            raise InvalidRequest(
                f"{where}: at most {MAX_CALLS} calls follow each other", param=where
            )


def _kind(item: Item) -> str:
    kind = item.get("type")
    if kind is None:
        return "item_reference" if item.keys() == {"id"} else "message"
    return kind if isinstance(kind, str) else ""


def _is_answer(item: Item) -> bool:
    kind = _kind(item)
    return kind.endswith("_call") or (kind == "message" and item.get("role") == "assistant")


def _id_of(item: Item) -> str:
    """Return the id by which a call and its result find each other; empty without one."""
    for name in ("call_id", "id"):
        if isinstance(found := item.get(name), str) and found:
            return found
    return ""


def _reasoning(item: Item, where: str) -> str:
    """Return the text of a reasoning item of an earlier answer; empty if another server has
    encrypted the text."""
    content = item.get("content")
    if content is None:
        content = item.get("summary")
    if content is not None and not isinstance(content, list | str):
        raise InvalidRequest(f"{where}.content must be a list of objects", param=f"{where}.content")
    return text_of(content, f"{where}.content", current=False)


def _message(item: Item, where: str, *, current: bool) -> Turn:
    role = string(item, "role", where)
    if role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role must be system, developer, user or assistant", param=f"{where}.role"
        )
    content = item.get("content")
    if content is None and role != "assistant":
        raise InvalidRequest(
            f"{where}.content must be a string or a list of text parts", param=f"{where}.content"
        )
    return text_turn(_ROLES[role], text_of(content, f"{where}.content", current=current))


def _output(given: Any, where: str, *, current: bool) -> str:
    """Return a call's output as text. That of hosted tools may be any value."""
    is_parts = isinstance(given, list) and all(
        isinstance(one, dict) and isinstance(one.get("type"), str) for one in given
    )
    if given is None or isinstance(given, str) or (is_parts and not _is_hosted(given)):
        return text_of(given, where, current=current)
    return json.dumps(given, ensure_ascii=False)[:_MAX_RESULT_CHARACTERS]


def _is_hosted(parts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a list holds results of a hosted tool, which are no parts of content."""
    return not all(str(part["type"]).startswith(("input_", "output_", "text")) for part in parts)
