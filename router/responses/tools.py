"""The tools of ``/v1/responses``, whose format is flatter than that of chat completions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest
from router.dialects.tools import (
    MAX_TOOLS,
    Tool,
    ToolChoice,
    among,
    bad_choice,
    checked_tool,
    choice_mode,
    custom_tool,
)


def response_tools(given: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Read the field ``tools`` of a body. Tools that a server runs itself are left out: the model
    does not know them. Raises InvalidRequest."""
    return [_tool(tool, where) for tool, where in _listed(given or (), "tools") if _is_known(tool)]


def _listed(given: Sequence[Any], where: str) -> Iterator[tuple[Mapping[str, Any], str]]:
    """Yield each tool and its path; those of a namespace, too."""
    for place, tool in enumerate(given):
        at = f"{where}[{place}]"
        if not isinstance(tool, dict):
            raise InvalidRequest(f"{at} must be an object", param=at)
        if tool.get("type") == "namespace" and isinstance(tool.get("tools"), list):
            yield from _listed(tool["tools"], f"{at}.tools")
        else:
            yield tool, at


def _is_known(tool: Mapping[str, Any]) -> bool:
    return tool.get("type") in ("function", "custom")


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") == "custom":
        return custom_tool(tool, where)
    name, description = tool.get("name"), tool.get("description")
    parameters, strict = tool.get("parameters"), tool.get("strict")
    if not isinstance(name, str):
        raise InvalidRequest(f"{where}.name must be a string", param=f"{where}.name")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.description must be a string", param=f"{where}.description")
    if parameters is not None and not isinstance(parameters, dict):
        raise InvalidRequest(f"{where}.parameters must be an object", param=f"{where}.parameters")
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{where}.strict must be true or false", param=f"{where}.strict")
    return checked_tool(name, description, parameters, bool(strict), where)


def response_choice(given: Any, tools: Sequence[Tool], *, parallel: bool | None) -> ToolChoice:
    """Read the field ``tool_choice`` of a body with these ``tools``. A choice of a tool that was
    left out is left to the model. Raises InvalidRequest."""
    single = parallel is False
    if given is None:
        return ToolChoice(single=single)
    if isinstance(given, str):
        return among(ToolChoice(choice_mode(given), single=single), tools)
    if not isinstance(given, dict):
        raise bad_choice()
    kind = given.get("type")
    if kind in ("function", "custom"):
        return ToolChoice("required", frozenset({_name(given)}), single=True)
    if kind != "allowed_tools":
        return ToolChoice(single=single)
    allowed = given.get("tools")
    if not isinstance(allowed, list) or not 0 < len(allowed) <= MAX_TOOLS:
        raise bad_choice()
    mode = choice_mode(given.get("mode"))
    names = frozenset(_name(one) for one in allowed if not _is_hosted(one))
    return among(ToolChoice(mode, names, single=single), tools)


def _is_hosted(tool: Any) -> bool:
    return isinstance(tool, dict) and isinstance(tool.get("type"), str) and not _is_known(tool)


def _name(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise bad_choice()
    return name
