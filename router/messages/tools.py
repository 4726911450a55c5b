"""The tools of ``/v1/messages``. Those that Anthropic's servers run are left out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest
from router.conversation.content import string
from router.dialects.tools import Tool, ToolChoice, ToolUse, among, checked_tool, use_of
from router.messages.protocol import CountTokensRequest

Block = Mapping[str, Any]
MAX_NAME = 128
"""Maximum number of characters of a tool's name, as at Anthropic."""


def message_tools(body: CountTokensRequest) -> ToolUse | None:
    """Read the tools of a body. Raises InvalidRequest."""
    given = body.tools or []
    tools = [
        _tool(tool, f"tools[{place}]") for place, tool in enumerate(given) if not _is_hosted(tool)
    ]
    choice = _choice(body.tool_choice)
    return use_of(tools, choice if len(tools) == len(given) else among(choice, tools))


def _is_hosted(tool: Block) -> bool:
    """Whether Anthropic runs a tool or defines its schema. The model knows none of these."""
    return tool.get("type") not in (None, "custom") and "input_schema" not in tool


def _tool(tool: Block, where: str) -> Tool:
    schema, description = tool.get("input_schema"), tool.get("description")
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"{where}.input_schema must be an object", param=f"{where}.input_schema"
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.description must be a string", param=f"{where}.description")
    name = string(tool, "name", where)
    strict = tool.get("strict") is True
    return checked_tool(name, description, schema, strict, where, most=MAX_NAME)


def _choice(given: Block | None) -> ToolChoice:
    given = given or {"type": "auto"}
    single = given.get("disable_parallel_tool_use") is True
    match given.get("type"):
        case "auto":
            return ToolChoice("auto", single=single)
        case "none":
            return ToolChoice("none")
        case "any":
            return ToolChoice("required", single=single)
        case "tool":
            names = frozenset({string(given, "name", "tool_choice")})
            return ToolChoice("required", names, single=True)
        case _:
            raise InvalidRequest(
                "tool_choice.type must be auto, any, tool or none", param="tool_choice.type"
            )
