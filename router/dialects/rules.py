"""Parts of grammars in llguidance's Lark dialect, built from the schemas of tools."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest
from router.dialects.tools import Tool

_JSON_STYLE = {
    **{"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "},
    "coerce_one_of": True,
}
"""Options of llguidance that allow one way to write each JSON value: a small model may otherwise
write white space forever. A ``oneOf`` counts as an ``anyOf`` (``baton.grammars.json_schema``)."""

_KEPT_OF_OBJECTS = frozenset(
    {"type", "properties", "required", "additionalProperties", "title", "description", "$schema"}
    | {"$defs", "definitions"}
)
"""Keywords that are supported in a tool's ``parameters`` schema by formats in which each argument
has its own rule."""


_TYPES = ("string", "integer", "number", "boolean", "array", "object", "null")


def literal(text: str, special: Mapping[str, int]) -> str:
    """Return the part of a grammar rule that matches ``text``.

    ``special`` gives the ids of markers that are special tokens. A rule for their text alone would
    allow other tokens, which the model does not know as its marker.
    """
    if not special:
        return json.dumps(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return " ".join(f"<[{special[p]}]>" if p in special else json.dumps(p) for p in parts if p)


def json_value(schema: Mapping[str, Any], tool: Tool) -> str:
    """Return the part of a grammar rule that matches JSON of ``schema``, which is a part of the
    schema of ``tool``."""
    # With strict, a schema that llguidance cannot fully check is rejected.
    style = _JSON_STYLE if tool.strict else {**_JSON_STYLE, "lenient": True}
    shared = {
        key: tool.parameters[key] for key in ("$defs", "definitions") if key in tool.parameters
    }
    return f"%json {json.dumps({**shared, **schema, 'x-guidance': style})}"


def pattern(text: str) -> str:
    """Escape ``text`` for a regular expression between slashes."""
    return re.escape(text).replace("/", r"\/")


def type_of(value: Any) -> str:
    """Return the JSON type of a value, as named in schemas."""
    names: dict[type, str] = {
        **{bool: "boolean", int: "integer", float: "number", str: "string"},
        **{list: "array", dict: "object"},
    }
    return names.get(type(value), "null")


def types_of(schema: Any, root: Mapping[str, Any]) -> frozenset[str]:
    """Return the JSON types that ``schema``, a part of ``root``, allows; empty: all of them."""
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
    # Read only one level: a choice may refer to the schema around it.
    types = [types_of({"type": resolved(one, root).get("type")}, root) for one in choices]
    return frozenset().union(*types) if all(types) else frozenset()


def properties_of(tool: Tool) -> Mapping[str, Any]:
    """Return the schemas of a tool's arguments by name."""
    found = tool.parameters.get("properties")
    return found if isinstance(found, dict) else {}


def required_of(tool: Tool) -> frozenset[str]:
    """Return the names of a tool's required arguments."""
    found = tool.parameters.get("required")
    names = found if isinstance(found, list) else []
    return frozenset(name for name in names if isinstance(name, str))


def resolved(schema: Any, root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return ``schema``, or the part of ``root`` that it refers to."""
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
    """Check that a grammar can enforce ``schema`` if ``tool`` is strict: its keywords must be among
    ``kept``. Raises InvalidRequest."""
    other = sorted(schema.keys() - kept)
    if tool.strict and other:
        raise InvalidRequest(
            f"the function {tool.name} is strict, but the model's tool call format does not"
            f" support {other[0]} in its schema: remove it, or set strict to false",
            param="tools",
        )
