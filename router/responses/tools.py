"""The tools of ``/v1/responses``, whose format is flatter than that of chat completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest, UnsupportedParameter
from router.dialects.tools import (
    MAX_TOOLS,
    Tool,
    ToolChoice,
    bad_choice,
    checked_tool,
    choice_mode,
)


def response_tools(given: Sequence[Mapping[str, Any]] | None) -> list[Tool]:
    """Read the field ``tools`` of a body. Raises InvalidRequest and UnsupportedParameter."""
    return [_tool(tool, f"tools[{place}]") for place, tool in enumerate(given or ())]


def _tool(tool: Mapping[str, Any], where: str) -> Tool:
    if tool.get("type") != "function":
        raise UnsupportedParameter(f"{where}: only functions are supported", param=f"{where}.type")
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


def response_choice(given: Any, *, parallel: bool | None) -> ToolChoice:
    """Read the field ``tool_choice`` of a body. Raises InvalidRequest and UnsupportedParameter."""
    single = parallel is False
    if given is None:
        return ToolChoice(single=single)
    if isinstance(given, str):
        return ToolChoice(choice_mode(given), single=single)
    if not isinstance(given, dict):
        raise bad_choice()
    kind = given.get("type")
    if kind == "function":
        return ToolChoice("required", frozenset({_name(given)}), single=True)
    if kind != "allowed_tools":
        raise UnsupportedParameter("only functions are supported", param="tool_choice.type")
    tools = given.get("tools")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise bad_choice()
    mode = choice_mode(given.get("mode"))
    return ToolChoice(mode, frozenset(map(_name, tools)), single=single)


def _name(value: Any) -> str:
    name = value.get("name") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise bad_choice()
    return name
