"""The tools of a request: OpenAI's format of their definitions, and the checked result."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from baton.errors import InvalidRequest

MAX_TOOLS = 128
MAX_CALLS = 128
"""Maximum number of tool calls in a message."""
MAX_TOOL_CHARACTERS = 1 << 18
"""Maximum size of all definitions of a request together, as JSON."""
Mode = Literal["none", "auto", "required"]
_MODES: tuple[Mode, ...] = ("none", "auto", "required")
_NAME = re.compile(r"[a-zA-Z0-9_-]+")
MAX_NAME_CHARACTERS = 64
"""Maximum number of characters of a tool's name, as at OpenAI."""
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
    is_custom: bool = False
    """Whether it takes free text, which is the string ``input`` of its arguments."""

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
    """`function`, or `custom`. Others, which servers run themselves, are left out."""
    function: FunctionDefinition | None = None
    custom: dict[str, Any] | None = None
    """`name`, `description` and `format` of a tool that takes free text."""


class CalledFunction(_Part):
    name: str
    arguments: str
    """The arguments as JSON."""


class MessageToolCall(_Part):
    """A tool call of an answer."""

    id: str
    type: str = "function"
    function: CalledFunction


class CustomToolInput(_Part):
    name: str
    input: str


class MessageCustomToolCall(_Part):
    """A call of a custom tool in an answer."""

    id: str
    type: str = "custom"
    custom: CustomToolInput


ToolDefinitions = Annotated[list[ToolDefinition], Field(fail_fast=True, max_length=MAX_TOOLS)]


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
    given = definitions or ()
    tools = [
        _tool(one, f"tools[{place}]")
        for place, one in enumerate(given)
        if one.type in ("function", "custom")
    ]
    asked = _choice(choice)
    if len(tools) < len(given):
        asked = among(asked, tools)
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
    name: str,
    description: str | None,
    schema: dict[str, Any] | None,
    strict: bool,
    where: str,
    *,
    most: int = MAX_NAME_CHARACTERS,
) -> Tool:
    """Check the definition of a function and return it as a Tool. ``where`` is its path in the
    request, for errors. Raises InvalidRequest."""
    check_name(name, f"{where}.name", most)
    parameters = schema or _NO_PARAMETERS
    if parameters.get("type", "object") != "object":
        raise InvalidRequest(
            f"{where}: the schema of the parameters must be of type object", param=where
        )
    return Tool(name, description, parameters, strict)


def check_name(name: str, where: str, most: int = MAX_NAME_CHARACTERS) -> None:
    """Check a function's name of ``most`` characters at most. ``where`` is its path in the request,
    for errors. Raises InvalidRequest."""
    if len(name) > most or _NAME.fullmatch(name) is None:
        raise InvalidRequest(
            f"{where} must be 1 to {most} of the characters a-z, A-Z, 0-9, _ and -", param=where
        )


def custom_tool(given: Mapping[str, Any], where: str) -> Tool:
    """Read a custom tool, which takes free text: a function with one string. Its grammar is part of
    the description, and a regular expression also a pattern of that string. Raises
    InvalidRequest."""
    name, description = given.get("name"), given.get("description")
    if not isinstance(name, str):
        raise InvalidRequest(f"{where}.name must be a string", param=f"{where}.name")
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.description must be a string", param=f"{where}.description")
    text: dict[str, Any] = {"type": "string"}
    form = given.get("format") or {}
    grammar = form.get("grammar", form) if isinstance(form, dict) else {}
    if isinstance(grammar, dict) and isinstance(grammar.get("definition"), str):
        syntax, definition = str(grammar.get("syntax", "lark")), grammar["definition"]
        description = "\n\n".join(
            filter(None, (description, f"The input matches this grammar ({syntax}):\n{definition}"))
        )
        if syntax == "regex":
            text["pattern"] = f"^(?:{definition})$"
    schema = {
        "type": "object",
        "properties": {"input": text},
        "required": ["input"],
        "additionalProperties": False,
    }
    tool = checked_tool(name, description, schema, False, where)
    return replace(tool, is_custom=True)


def custom_names(use: ToolUse | None) -> frozenset[str]:
    """Return the names of the tools that take free text."""
    return frozenset(tool.name for tool in use.tools if tool.is_custom) if use else frozenset()


def custom_input(arguments: str) -> str:
    """Return the text for a custom tool from the arguments of its call, which may be broken."""
    try:
        value = json.loads(arguments)
    except ValueError:
        return arguments
    found = value.get("input") if isinstance(value, dict) else None
    return found if isinstance(found, str) else arguments


def among(choice: ToolChoice, tools: Sequence[Tool]) -> ToolChoice:
    """Return a choice among ``tools`` if others of the request were left out. A choice of those
    alone is left to the model."""
    names = None if choice.names is None else choice.names & {tool.name for tool in tools}
    if choice.mode == "required" and not (tools if names is None else names):
        return ToolChoice(single=choice.single)
    return replace(choice, names=names if names != frozenset() else None)


def _tool(definition: ToolDefinition, where: str) -> Tool:
    if definition.type == "custom":
        return custom_tool(definition.custom or {}, f"{where}.custom")
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
        return ToolChoice("required", frozenset({_name_of(choice)}), single=True)
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
    if not isinstance(value, dict):
        raise bad_choice()
    function = value.get("function") or value.get("custom")
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
