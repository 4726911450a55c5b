"""The tools of a request, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that the model may call."""

    name: str
    description: str | None
    parameters: Mapping[str, Any]
    """A JSON schema of an object."""
    strict: bool = False

    def as_template_value(self) -> dict[str, Any]:
        """As chat templates know tools."""
        function: dict[str, Any] = {"name": self.name}
        if self.description is not None:
            function["description"] = self.description
        return {"type": "function", "function": {**function, "parameters": dict(self.parameters)}}


@dataclass(frozen=True, slots=True)
class ToolUse:
    """Which tools the model is told of, and what it may do with them."""

    tools: tuple[Tool, ...]
    """At least one; names are unique."""
    names: frozenset[str]
    """Those that may be called."""
    required: bool = False
    """At least one must be called."""
    single: bool = False
    """At most one call in an answer."""
    characters: int = 0
    """The size of all definitions as JSON."""

    @property
    def callable_tools(self) -> tuple[Tool, ...]:
        return tuple(tool for tool in self.tools if tool.name in self.names)
