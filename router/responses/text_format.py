"""``text.format`` of ``/v1/responses``: the format of the answer's text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest
from baton.grammar import Grammar, GrammarKind

PLAIN: dict[str, Any] = {"type": "text"}


def text_format(text: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check the field ``text`` of a body, and return the ``format`` in it as the client gave it.
    Raises InvalidRequest."""
    if text is None:
        return PLAIN
    form = text.get("format")
    if form is None:
        return PLAIN
    if not isinstance(form, dict):
        raise InvalidRequest("text.format must be an object", param="text.format")
    return form


def format_grammar(form: Mapping[str, Any]) -> Grammar | None:
    """Return the grammar that ``text.format`` requires of the answer; None for plain text. Raises
    InvalidRequest."""
    kind = form.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return Grammar(GrammarKind.JSON_OBJECT, "")
    if kind != "json_schema":
        raise InvalidRequest(
            "text.format.type must be text, json_object or json_schema", param="text.format.type"
        )
    schema = form.get("schema")
    if not isinstance(schema, dict):
        raise InvalidRequest("text.format.schema must be an object", param="text.format.schema")
    if not isinstance(form.get("name"), str):
        raise InvalidRequest("text.format.name must be a string", param="text.format.name")
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))
