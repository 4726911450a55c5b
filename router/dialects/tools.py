"""The tools of a request: OpenAI's format of their definitions, and the checked result."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.errors import InvalidRequest, UnsupportedParameter

MAX_TOOLS = 128
MAX_CALLS = 128
"""Maximum number of tool calls in a message."""
MAX_TOOL_CHARACTERS = 1 << 18
"""Maximum size of all definitions of a request together, as JSON."""
Mode = Literal["none", "auto", "required"]
_MODES: tuple[Mode, ...] = ("none", "auto", "required")
_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_SHOWN_CHARACTERS = 64
"""Maximum number of characters that an error message shows of a tool name from a client."""
_NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    """JSON schema of the function's arguments, which are an object."""
    strict: bool = False

    def as_template_value(self) -> dict[str, Any]:
        """Return the value that chat templates expect for a tool."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools that the model receives, and how it may call them."""

    tools: tuple[Tool, ...]
    """The tools that the model receives: at least one; their names are unique."""
    names: frozenset[str]
    """Names of the tools that may be called."""
    required: bool = False
    """Whether the answer must call at least one tool."""
    single: bool = False
    """Whether the answer may have only one tool call."""
    characters: int = 0
    """Size of all tools' definitions as JSON, in characters."""

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.names)


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)


class FunctionDefinition(_Part):
    name: str
    """1 to 64 letters, digits, `_` and `-`."""
    description: str | None = None
    """A description for the model."""
    parameters: dict[str, Any] | None = None
    """A JSON schema of an object; without one the function takes no arguments."""
    strict: bool | None = None
    """Whether to reject a schema that cannot be fully enforced."""


class ToolDefinition(_Part):
    type: str
    """Only `function` is supported."""
    function: FunctionDefinition | None = None


class CalledFunction(_Part):
    name: str
    arguments: str
    """The arguments as JSON."""


class MessageToolCall(_Part):
    """A tool call of an earlier answer, which the client sends back."""

    id: str
    type: str = "function"
    function: CalledFunction


ToolDefinitions = Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)]
MessageToolCalls = Annotated[list[MessageToolCall], Field(fail_fast=True, max_length=MAX_CALLS)]


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """The settings of ``tool_choice`` and parallel tool calls in a request."""

    mode: Mode = "auto"
    names: frozenset[str] | None = None
    """The tools that may be called; None: all of them."""
    single: bool = False
    """Whether the answer may have at most one tool call."""


_ANY_TOOL = ToolChoice()


def tool_use(
    definitions: Sequence[ToolDefinition] | None, choice: Any, *, parallel: bool | None
) -> ToolUse | None:
    """Check a chat completion's ``tools``, ``tool_choice`` and ``parallel_tool_calls``.

    Returns None if no tool may be called. The model then receives none. Raises InvalidRequest and
    UnsupportedParameter.
    """
    tools = [_tool(one, f"tools[{place}]") for place, one in enumerate(definitions or ())]
    asked = _choice(choice)
    return use_of(tools, replace(asked, single=True) if parallel is False else asked)


def use_of(tools: Sequence[Tool], choice: ToolChoice) -> ToolUse | None:
    """Combine the tools of a request with its choice among them. Returns None if no tool may be
    called. Raises InvalidRequest."""
    check_tools(tools)
    names = frozenset(tool.name for tool in tools)
    if not tools:
        if choice.mode == "required":
            raise InvalidRequest("tool_choice requires tools", param="tool_choice")
        return None
    if choice.names is not None and (missing := sorted(choice.names - names)):
        shown = json.dumps(missing[0][:_SHOWN_CHARACTERS])
        raise InvalidRequest(
            f"tool_choice names {shown}, which is not among the tools", param="tool_choice"
        )
    if choice.mode == "none":
        return None
    size = len(json.dumps([tool.as_template_value() for tool in tools]))
    if size > MAX_TOOL_CHARACTERS:
        raise InvalidRequest(
            f"tools have {size} characters; at most {MAX_TOOL_CHARACTERS} are possible",
            param="tools",
        )
    return ToolUse(
        tuple(tools),
        names if choice.names is None else choice.names,
        required=choice.mode == "required",
        single=choice.single,
        characters=size,
    )


def check_tools(tools: Sequence[Tool]) -> None:
    """Check the number of tools and that names are unique. Raises InvalidRequest."""
    check_tool_count(len(tools))
    if len({tool.name for tool in tools}) != len(tools):
        raise InvalidRequest("two tools have the same name", param="tools")


def check_tool_count(tools: int) -> None:
    """Check the number of tools. Raises InvalidRequest."""
    if tools > MAX_TOOLS:
        raise InvalidRequest(f"at most {MAX_TOOLS} tools are possible", param="tools")


def checked_tool(
    name: str, description: str | None, schema: dict[str, Any] | None, strict: bool, where: str
) -> Tool:
    """Check the definition of a function and return it as a Tool. ``where`` is its path in the
    request, for errors. Raises InvalidRequest."""
    check_name(name, f"{where}.name")
    parameters = schema or _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{where}: the schema of the parameters must be of type object", param=where
        )
    return Tool(name, description, parameters, strict)


def check_name(name: str, where: str) -> None:
    """Check a function's name. ``where`` is its path in the request, for errors. Raises
    InvalidRequest."""
    if _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{where} must be 1 to 64 of the characters a-z, A-Z, 0-9, _ and -", param=where
        )


def _tool(definition: ToolDefinition, where: str) -> Tool:
    if definition.type != "function":
        raise UnsupportedParameter(f"{where}: only functions are supported", param=f"{where}.type")
    function = definition.function
    if function is None:
        raise InvalidRequest(f"{where}.function is required", param=f"{where}.function")
    return checked_tool(
        function.name,
        function.description,
        function.parameters,
        bool(function.strict),
        f"{where}.function",
    )


def _choice(choice: Any) -> ToolChoice:
    if choice is None:
        return _ANY_TOOL
    if isinstance(choice, str):
        return ToolChoice(choice_mode(choice))
    if not isinstance(choice, dict):
        raise bad_choice()
    kind = choice.get("type")
    if kind == "function":
        return ToolChoice("required", frozenset({_name_of(choice)}), single=True)
    if kind == "allowed_tools":
        return _allowed(choice.get("allowed_tools"))
    if kind == "custom":
        raise UnsupportedParameter("only functions are supported", param="tool_choice.type")
    raise bad_choice()


def choice_mode(value: Any) -> Mode:
    """Check that ``value`` is a mode of ``tool_choice``, and return it. Raises InvalidRequest."""
    for mode in _MODES:
        if value == mode:
            return mode
    raise bad_choice()


def _allowed(allowed: Any) -> ToolChoice:
    if not isinstance(allowed, dict) or allowed.get("mode") == "none":
        raise bad_choice()
    tools = allowed.get("tools")
    if not isinstance(tools, list) or not 0 < len(tools) <= MAX_TOOLS:
        raise bad_choice()
    return ToolChoice(choice_mode(allowed.get("mode")), frozenset(map(_name_of, tools)))


def _name_of(value: Any) -> str:
    function = value.get("function") if isinstance(value, dict) else None
    name = function.get("name") if isinstance(function, dict) else None
    if not isinstance(name, str):
        raise bad_choice()
    return name


def bad_choice() -> InvalidRequest:
    """Build the error for an unknown tool_choice."""
    return InvalidRequest(
        "tool_choice must be none, auto, required, the name of a function, or allowed_tools,"
        " in OpenAI's form",
        param="tool_choice",
    )
