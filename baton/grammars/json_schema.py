"""JSON schemas for answers: objects have only the listed properties.

JSON Schema's default for ``additionalProperties`` is true. A model that may add properties does so,
and clients expect those that they named. Servers such as vLLM use false as the default. An
``additionalProperties`` in the schema keeps its meaning. Plain Python.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

WHITESPACE = r"(?: |\n[ \t]{0,40})?"
"""Whitespace between the parts of JSON: none, a space, or a new line and its indentation. It is
bounded, because models that may write whitespace forever sometimes do."""
LIBRARY_OPTIONS: Any = {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}
"""Options of the grammar library. It refuses a ``oneOf`` unless it can prove that a value matches
one schema at most; ``coerce_one_of`` takes such a ``oneOf`` as an ``anyOf``, as vLLM does."""
_MAX_DEPTH = 256
"""Maximum depth that is processed. The grammar library refuses schemas half as deep."""
_SAYS_OTHERS = frozenset({"additionalProperties", "unevaluatedProperties"})
_ALTERNATIVES = ("anyOf", "oneOf")
_OF_INSTANCE = ("allOf", *_ALTERNATIVES)
"""Keywords with lists of schemas for the same value."""
_CONDITIONS = ("if", "then", "else", "not", "dependentSchemas", "$dynamicRef")
"""Keywords that combine a schema with others in ways that this module does not change."""
_NAMED = ("properties", "patternProperties", "$defs", "definitions")
"""Keywords for objects whose values are schemas."""
_NESTED = ("items", "additionalItems", "contains", "additionalProperties", "propertyNames")
_LISTED = ("items", "prefixItems")


def closed_text(text: str) -> str:
    """Apply ``closed_schema`` to JSON. Other texts stay as they are, for the library's error."""
    try:
        return json.dumps(closed_schema(json.loads(text)))
    except (ValueError, RecursionError):
        return text


def closed_schema(schema: Any) -> Any:
    """Return a copy of ``schema`` whose objects allow no properties beyond the listed ones.

    Some objects stay open: those that list no properties, that describe additional ones, that
    require properties that they do not list, or that are combined with other schemas. Each part of
    an ``allOf`` would forbid the properties of the others.
    """
    return _closed(schema, _open_references(schema), "#", is_open=False, depth=0)


def _closed(schema: Any, open_at: frozenset[str], at: str, *, is_open: bool, depth: int) -> Any:
    """Return one schema, closed as ``closed_schema`` does it. ``at`` is the schema's JSON pointer
    if references may use the pointer, else empty."""
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
    """Whether at most one schema describes a value: this one, or one that it references."""
    if any(name in schema for name in _CONDITIONS):
        return False
    parts = sum(name in schema for name in ("properties", "$ref", *_ALTERNATIVES))
    both = schema.get("allOf")
    return parts + (len(both) if isinstance(both, list) else 0) <= 1


def _open_references(schema: Any) -> frozenset[str]:
    """Return references to those schemas that are combined with other schemas anywhere in
    ``schema``."""
    found: set[str] = set()
    pending = list(_references(schema, is_open=False))
    while pending:
        reference = pending.pop()
        if reference not in found:
            found.add(reference)
            pending += _references(_target(schema, reference), is_open=True)
    return frozenset(found)


def _references(schema: Any, *, is_open: bool) -> Iterator[str]:
    """Yield the references in ``schema`` to schemas that are combined with others. ``is_open`` is
    true if ``schema`` itself is combined with others.

    Each part of a schema is visited once, even if several schemas combine it.
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
    """Return the schema of a reference such as ``#/$defs/name``; None for other references."""
    _, *path = reference.split("/")
    if len(path) != 2 or not isinstance(schema, dict):
        return schema if reference == "#" else None
    held = schema.get(path[0])
    return held.get(path[1]) if isinstance(held, dict) else None
