"""Reads the grammar that a request sets for its answer, from the fields of OpenAI, vLLM and SGLang.

Functions raise InvalidRequest.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from baton.errors import InvalidRequest, UnsupportedParameter
from baton.grammar import Grammar, GrammarKind
from router.openai.structural_tag import structural_tag

_NAME = re.compile(r"[a-zA-Z0-9_-]{1,64}")
_FORMATS = "text, json_object, json_schema or structural_tag"
_OF_NOTHING = frozenset({"disable_additional_properties"})
"""Options of ``structured_outputs`` that are accepted because they have no effect on the answer."""


class GrammarFields(Protocol):
    """The fields of a body that set a grammar."""

    @property
    def response_format(self) -> Any: ...
    @property
    def guided_json(self) -> Any: ...
    @property
    def guided_regex(self) -> str | None: ...
    @property
    def guided_choice(self) -> list[str] | None: ...
    @property
    def guided_grammar(self) -> str | None: ...
    @property
    def structural_tag(self) -> Any: ...
    @property
    def structured_outputs(self) -> Any: ...
    @property
    def regex(self) -> str | None: ...
    @property
    def ebnf(self) -> str | None: ...
    @property
    def json_schema(self) -> Any: ...


def grammar_of(body: GrammarFields) -> dict[str, Any]:
    """Return the grammar of a body as fields of ``SamplingInput``; empty if it sets none.

    Raises InvalidRequest.
    """
    given = [
        (grammar, param)
        for param, grammar in (
            ("response_format", _response_format(body.response_format)),
            ("guided_json", _schema(body.guided_json, "guided_json")),
            ("guided_regex", _text(GrammarKind.REGEX, body.guided_regex, "guided_regex")),
            ("guided_choice", choice(body.guided_choice, "guided_choice")),
            ("guided_grammar", _text(GrammarKind.LARK, body.guided_grammar, "guided_grammar")),
            ("structural_tag", structural_tag(body.structural_tag, "structural_tag")),
            ("regex", _text(GrammarKind.REGEX, body.regex, "regex")),
            ("ebnf", _text(GrammarKind.LARK, body.ebnf, "ebnf")),
            ("json_schema", _schema(body.json_schema, "json_schema")),
        )
        if grammar is not None
    ]
    given += _structured_outputs(body.structured_outputs)
    if len(given) > 1:
        raise InvalidRequest(
            f"{given[0][1]} and {given[1][1]} exclude each other: give one", param=given[1][1]
        )
    return {"grammar": given[0][0], "grammar_param": given[0][1]} if given else {}


def choice(texts: Any, param: str) -> Grammar | None:
    """Return a grammar that matches exactly one of ``texts``; None if the client gave none. Raises
    InvalidRequest."""
    if texts is None:
        return None
    is_list = isinstance(texts, Sequence) and not isinstance(texts, str)
    if not is_list or not texts or not all(isinstance(text, str) for text in texts):
        raise InvalidRequest(f"{param} must be a list of at least one string", param=param)
    return Grammar(GrammarKind.CHOICE, json.dumps(list(texts)))


def _response_format(given: Any) -> Grammar | None:
    param = "response_format"
    if given is None:
        return None
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object with a type", param=param)
    match given.get("type"):
        case "text":
            return None
        case "json_object":
            return Grammar(GrammarKind.JSON_OBJECT, "")
        case "json_schema":
            return _json_schema(given.get("json_schema"), f"{param}.json_schema")
        case "structural_tag":
            return structural_tag(given, param)
        case _:
            raise InvalidRequest(f"{param}.type must be {_FORMATS}", param=f"{param}.type")


def _json_schema(given: Any, param: str) -> Grammar:
    """Read the object ``json_schema`` of ``response_format``: a schema with its name. Its field
    ``strict`` has no effect.

    Schemas that can be enforced are always enforced strictly; others are rejected.
    """
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object with name and schema", param=param)
    name, strict = given.get("name"), given.get("strict")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise InvalidRequest(
            f"{param}.name must have 1 to 64 letters, digits, underscores and dashes",
            param=f"{param}.name",
        )
    if strict is not None and not isinstance(strict, bool):
        raise InvalidRequest(f"{param}.strict must be true or false", param=f"{param}.strict")
    schema = given.get("schema")
    if not isinstance(schema, Mapping):
        raise InvalidRequest(f"{param}.schema must be a JSON schema", param=f"{param}.schema")
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(schema))


def _schema(given: Any, param: str) -> Grammar | None:
    """Read a JSON schema that is given as an object, or as JSON in a string."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return Grammar(GrammarKind.JSON_SCHEMA, json.dumps(given))
    if isinstance(given, str):
        return Grammar(GrammarKind.JSON_SCHEMA, given)
    raise InvalidRequest(f"{param} must be a JSON schema", param=param)


def _text(kind: GrammarKind, given: Any, param: str) -> Grammar | None:
    if given is None:
        return None
    if not isinstance(given, str) or not given:
        raise InvalidRequest(f"{param} must be a string that is not empty", param=param)
    return Grammar(kind, given)


def _structured_outputs(given: Any) -> list[tuple[Grammar, str]]:
    param = "structured_outputs"
    if given is None:
        return []
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object", param=param)
    found: dict[str, Grammar | None] = {
        "json": _schema(given.get("json"), f"{param}.json"),
        "regex": _text(GrammarKind.REGEX, given.get("regex"), f"{param}.regex"),
        "choice": choice(given.get("choice"), f"{param}.choice"),
        "grammar": _text(GrammarKind.LARK, given.get("grammar"), f"{param}.grammar"),
        "json_object": _json_object(given.get("json_object"), f"{param}.json_object"),
        "structural_tag": structural_tag(given.get("structural_tag"), f"{param}.structural_tag"),
    }
    for name, value in given.items():
        known = name in found or name in _OF_NOTHING
        if not known and value is not None and value is not False:
            shown = f"{param}.{name}"[:64]
            raise UnsupportedParameter(f"'{shown}' is not supported by this server", param=shown)
    inputs = [
        (grammar, f"{param}.{name}") for name, grammar in found.items() if grammar is not None
    ]
    if not inputs:
        raise InvalidRequest(f"{param} must have one of {', '.join(found)}", param=param)
    return inputs


def _json_object(given: Any, param: str) -> Grammar | None:
    if given is None or given is False:
        return None
    if given is not True:
        raise InvalidRequest(f"{param} must be true or false", param=param)
    return Grammar(GrammarKind.JSON_OBJECT, "")
