"""JSON schemas as answers follow them: objects have the properties that are listed, and no others.

JSON Schema's default for ``additionalProperties`` is true. A model that may add properties does,
and clients expect those that they have named: servers such as vLLM take false for the default. An
``additionalProperties`` in the schema keeps its meaning. Plain Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

WHITESPACE = r"(?: |\n[ \t]{0,40})?"
"""Between the parts of JSON: nothing, a space, or a new line and its indentation. Bounded, because
a model that may write spaces for ever sometimes does."""
_MAX_DEPTH = 256
"""Levels that are looked at; the grammar library refuses schemas that are half as deep."""
_SAYS_OTHERS = frozenset({"additionalProperties", "unevaluatedProperties"})
_ALTERNATIVES = ("anyOf", "oneOf")
_OF_INSTANCE = ("allOf", *_ALTERNATIVES)
"""Lists of schemas for the same value."""
_CONDITIONS = ("if", "then", "else", "not", "dependentSchemas", "$dynamicRef")
"""What a schema combines with others in ways that are left as they are."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Objects whose values are schemas."""
_NESTED = ("items", "additionalItems", "contains", "additionalProperties", "propertyNames")
_LISTED = ("items", "prefixItems")


def closed_text(text: str) -> str:
    """``closed_schema`` of JSON; other texts stay as they are, for the library's error."""
    try:
        return json.dumps(closed_schema(json.loads(text)))
    except (ValueError, RecursionError):
        return text


def closed_schema(schema: Any) -> Any:
    """A copy of ``schema`` whose objects have no more properties than are listed.

    Objects stay open that list none, that say something of further ones, that require properties
    that they do not list, or that are combined with other schemas: of ``allOf`` each part would
    forbid the properties of the others.
    """
    return _closed(schema, _open_references(schema), "#", is_open=False, depth=0)


def _closed(schema: Any, open_at: frozenset[str], at: str, *, is_open: bool, depth: int) -> Any:
    """``at`` is the schema's JSON pointer, as far as references name it; else empty."""
    if not isinstance(schema, dict) or depth > _MAX_DEPTH:
        return schema
    stays_open = is_open or at in open_at or not _is_alone(schema)
    found = dict(schema)
    for name in _OF_INSTANCE:
        if isinstance(parts := schema.get(name), list):
            found[name] = [
                _closed(one, open_at, "", is_open=stays_open, depth=depth + 1) for one in parts
            ]
    for name in _NAMED:
        if isinstance(held := schema.get(name), dict):
            place = f"{at}/{name}" if at == "#" else ""
            found[name] = {
                key: _closed(
                    one, open_at, place and f"{place}/{key}", is_open=False, depth=depth + 1
                )
                for key, one in held.items()
            }
    for name in _NESTED:
        if name in schema:
            found[name] = _closed(schema[name], open_at, "", is_open=False, depth=depth + 1)
    for name in _LISTED:
        if isinstance(items := schema.get(name), list):
            found[name] = [
                _closed(one, open_at, "", is_open=False, depth=depth + 1) for one in items
            ]
    if not stays_open and _lists_all(schema):
        found["additionalProperties"] = False
    return found


def _lists_all(schema: Mapping[str, Any]) -> bool:
    """Whether an object may be limited to the properties that the schema lists."""
    properties, required = schema.get("properties"), schema.get("required", [])
    if not isinstance(properties, dict) or not properties or not isinstance(required, list):
        return False
    if _SAYS_OTHERS & schema.keys() or "patternProperties" in schema:
        return False
    fewest = schema.get("minProperties", 0)
    enough = isinstance(fewest, int) and fewest <= len(properties)
    return enough and all(isinstance(one, str) and one in properties for one in required)


def _is_alone(schema: Mapping[str, Any]) -> bool:
    """Whether at most one schema says what a value is: this one, or one that it names."""
    if any(name in schema for name in _CONDITIONS):
        return False
    parts = sum(name in schema for name in ("properties", "$ref", *_ALTERNATIVES))
    both = schema.get("allOf")
    return parts + (len(both) if isinstance(both, list) else 0) <= 1


def _open_references(schema: Any) -> frozenset[str]:
    """References to schemas that are combined with others somewhere."""
    found: set[str] = set()
    pending = list(_references(schema, is_open=False))
    while pending:
        reference = pending.pop()
        if reference not in found:
            found.add(reference)
            pending += _references(_target(schema, reference), is_open=True)
    return frozenset(found)


def _references(schema: Any, *, is_open: bool) -> Iterator[str]:
    """References of schemas that are combined with others; ``is_open``: this one is.

    Each part is looked at once, whatever combines it.
    """
    pending = [(schema, is_open, 0)]
    while pending:
        one, combined, depth = pending.pop()
        if depth > _MAX_DEPTH:
            continue
        if isinstance(one, list):
            pending += [(part, combined, depth + 1) for part in one]
        elif isinstance(one, dict):
            combined = combined or not _is_alone(one)
            if combined and isinstance(reference := one.get("$ref"), str):
                yield reference
            pending += [
                (part, combined and name in _OF_INSTANCE, depth + 1) for name, part in one.items()
            ]


def _target(schema: Any, reference: str) -> Any:
    """The schema that ``#/$defs/name`` or its like names; None for other references."""
    _, *path = reference.split("/")
    if len(path) != 2 or not isinstance(schema, dict):
        return schema if reference == "#" else None
    held = schema.get(path[0])
    return held.get(path[1]) if isinstance(held, dict) else None
