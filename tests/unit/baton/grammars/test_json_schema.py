"""Schemas as answers follow them: no more properties than are listed, where that can be kept."""

from __future__ import annotations

import json
from typing import Any

import pytest

from baton.grammars.json_schema import closed_schema, closed_text
from tests.support.baton.grammar_tools import accepts, schema

A = {"properties": {"a": {"type": "integer"}}}
B = {"properties": {"b": {"type": "integer"}}}
CLOSED_A = {**A, "additionalProperties": False}


@pytest.mark.parametrize(
    ("given", "closed"),
    [
        (A, CLOSED_A),
        ({**A, "additionalProperties": True}, {**A, "additionalProperties": True}),
        ({**A, "unevaluatedProperties": {}}, {**A, "unevaluatedProperties": {}}),
        ({**A, "patternProperties": {"^x": {}}}, {**A, "patternProperties": {"^x": {}}}),
        ({**A, "required": ["z"]}, {**A, "required": ["z"]}),
        ({**A, "minProperties": 2}, {**A, "minProperties": 2}),
        ({"type": "object"}, {"type": "object"}),
        ({"items": A}, {"items": CLOSED_A}),
        ({"prefixItems": [A]}, {"prefixItems": [CLOSED_A]}),
        ({"additionalProperties": A}, {"additionalProperties": CLOSED_A}),
        ({"anyOf": [A, {"type": "null"}]}, {"anyOf": [CLOSED_A, {"type": "null"}]}),
        ({"allOf": [A]}, {"allOf": [CLOSED_A]}),
        ({"allOf": [A, B]}, {"allOf": [A, B]}),
        ({**A, "anyOf": [B]}, {**A, "anyOf": [B]}),
        ({**A, "if": B, "then": B}, {**A, "if": B, "then": B}),
        ({"enum": [A]}, {"enum": [A]}),
        ({"$ref": "#/$defs/A", "$defs": {"A": A}}, {"$ref": "#/$defs/A", "$defs": {"A": CLOSED_A}}),
        (True, True),
    ],
    ids=str,
)
def test_objects_that_stand_alone_are_closed(given: Any, closed: Any) -> None:
    before = json.dumps(given)
    assert closed_schema(given) == closed
    assert json.dumps(given) == before, "the client's schema stays as it is"


def test_within_properties_objects_are_closed_again() -> None:
    given = {"allOf": [{"properties": {"x": A}}, B]}
    assert closed_schema(given) == {"allOf": [{"properties": {"x": CLOSED_A}}, B]}


def test_what_is_combined_somewhere_stays_open_everywhere() -> None:
    """Of its own parts, too: a definition that another one names."""
    definitions = {"A": {"$ref": "#/$defs/C"}, "C": A, "D": B}
    given = {
        "properties": {"x": {"allOf": [{"$ref": "#/$defs/A"}, B]}, "y": {"$ref": "#/$defs/D"}},
        "$defs": definitions,
    }
    found = closed_schema(given)["$defs"]
    assert found["C"] == A
    assert found["D"]["additionalProperties"] is False


def test_a_schema_that_names_itself_ends() -> None:
    tree = {"properties": {"left": {"$ref": "#"}, "right": {"allOf": [{"$ref": "#"}, B]}}}
    assert "additionalProperties" not in closed_schema(tree)


@pytest.mark.parametrize("depth", [250, 5000])
def test_deep_schemas_end(depth: int) -> None:
    text = '{"properties":{"a":' * depth + "{}" + "}}" * depth
    assert closed_text(text)


def test_nested_combinations_are_looked_at_once() -> None:
    """Not once for each level above them: that would take minutes here."""
    nested: Any = {"anyOf": [{"$ref": f"#/$defs/{place}"} for place in range(2000)]}
    for _ in range(100):
        nested = {"allOf": [nested, B]}
    seen = 0

    class Counted(dict[str, Any]):
        def get(self, name: str, default: Any = None) -> Any:
            nonlocal seen
            seen += name == "$ref"
            return super().get(name, default)

    parts = nested["allOf"]
    while "allOf" in parts[0]:
        parts = parts[0]["allOf"]
    parts[0] = {"anyOf": [Counted(one) for one in parts[0]["anyOf"]]}
    closed_schema(nested)
    assert 2000 <= seen < 10_000


@pytest.mark.parametrize("text", ["{", "", "nonsense"])
def test_what_is_not_json_stays_for_the_librarys_error(text: str) -> None:
    assert closed_text(text) == text


@pytest.mark.parametrize(
    ("given", "text", "fits"),
    [
        (A, '{"a": 36}', True),
        (A, '{"a": 36, "b": 1}', False),
        ({**A, "additionalProperties": True}, '{"a": 36, "b": 1}', True),
        ({"allOf": [A, B]}, '{"a": 36, "b": 1}', True),
        ({**A, "required": ["b"]}, '{"a": 36, "b": 1}', True),
    ],
    ids=str,
)
def test_answers(given: Any, text: str, fits: bool) -> None:
    assert accepts(schema(json.dumps({"type": "object", **given})), text) is fits
