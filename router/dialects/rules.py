"""Parts of grammars in llguidance's Lark dialect, made from the schemas of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest
from router.dialects.tools import Tool

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value: a small model may otherwise write white space forever."""

_KEPT_OF_OBJECTS = frozenset(
    {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
    | {"$defs", "definitions"}
)
"""Keywords of the schema of all arguments that are kept where each argument has its own rule."""


_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


def literal(text: str, special: Mapping[str, int]) -> str:
    """The part of a rule that matches ``text``.

    ``special`` gives the ids of markers that are special tokens. Their text alone would be drawn
    as other tokens, which the model does not know as its marker.
    """
    if not special:
        return json.dumps(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return " ".join(f"<[{special[p]}]>" if p in special else json.dumps(p) for p in parts if p)


def json_value(schema: Mapping[str, Any], tool: Tool) -> str:
    """The part of a rule that matches JSON that fits ``schema``, which is part of ``tool``'s."""
    # With strict, a schema that llguidance cannot check in full is refused.
    style = _JSON_STYLE if tool.strict else {**_JSON_STYLE, "lenient": True}
    shared = {
        key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
    }
    return f"%json {json.dumps({**shared, **schema, 'x-guidance': style})}"


def pattern(text: str) -> str:
    """``text`` as a part of a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


def type_of(value: Any) -> str:
    """The JSON type of a value, as schemas call it."""
    names: dict[type, str] = {
        **{bool: "boolean", int: "integer", float: "number", str: "string"},
        **{list: "array", dict: "object"},
    }
    return names.get(type(value), "null")


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """The JSON types that ``schema``, a part of ``root``, allows; empty: all of them."""
    schema = resolved(schema, root)
    kind = schema.get("type")
    if kind is not None:
        kinds = kind if isinstance(kind, list) else [kind]
        # Clients also write names of other languages, such as float.
        return frozenset(kinds) if all(one in _TYPES for one in kinds) else frozenset()
    values = [schema["const"]] if "const" in schema else schema.get("enum")
    if isinstance(values, list):
        return frozenset(type_of(value) for value in values)
    choices = schema.get("anyOf") or schema.get("oneOf")
    if not isinstance(choices, list):
        return frozenset()
    # A choice may refer to the schema around it: only one level is read.
    types = [types_of({"type": resolved(one, root).get("type")}, root) for one in choices]
    return frozenset().union(*types) if all(types) else frozenset()


def properties_of(tool: Tool) -> Mapping[str, Any]:
    """The schemas of a tool's arguments by name."""
    found = tool.parameters.get("properties")
    return found if isinstance(found, dict) else {}


def required_of(tool: Tool) -> frozenset[str]:
    """The names of the arguments that a tool requires."""
    found = tool.parameters.get("required")
    names = found if isinstance(found, list) else []
    return frozenset(name for name in names if isinstance(name, str))


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """``schema``, or what its reference to a part of ``root`` names."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema if isinstance(schema, dict) else {}
    found: Any = root
    for key in reference[2:].split("/"):
        found = found.get(key) if isinstance(found, dict) else None
    return found if isinstance(found, dict) and "$ref" not in found else {}


def check_kept(
    tool: Tool, schema: Mapping[str, Any], kept: frozenset[str] = _KEPT_OF_OBJECTS
) -> None:
    """Raises InvalidRequest for a strict tool with a keyword that no grammar keeps."""
    other = sorted(schema.keys() - kept)
    if tool.strict and other:
        raise InvalidRequest(
            f"the function {tool.name} is strict, and the model's format of calls cannot keep"
            f" {other[0]} in its schema",
            param="tools",
        )
