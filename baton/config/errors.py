"""Errors of a configuration in plain words, with the flag, variable or line at fault."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from baton.config.fields import advice
from baton.config.sources import PREFIX, FlagSource, Location, Sources, has

_UNNAMED = ("extra_forbidden", "missing")
"""Kinds of errors about fields that no source names."""
_LONGEST = 80
"""Maximum length of a value that a message repeats, in characters."""
_TABLES = {"pools": "pool", "classes": "class", "tenants": "tenant", "keys": "key"}
"""Name that messages use for one entry of each list of tables."""
_SECRET = re.compile("sha256|secret|url|^(keys|gcs_store|otlp_endpoint)$")
"""Fields whose values, and the values in them, are not repeated. They hold a password or a token in
a URL, or a key in place of its hash."""
_PATTERNS = {
    r"^[A-Za-z0-9._-]{1,64}$": "1 to 64 letters, digits, dots, dashes and underscores",
    "^([0-9a-f]{64})?$": "64 hexadecimal digits in lower case, or empty",
    "^([!-~]{32,})?$": "at least 32 letters, digits and signs (`openssl rand -hex 32` makes some)",
}
_MISSING: Mapping[str, str] = MappingProxyType(
    {"tenant": 'write "default", or another name: keys of one tenant share files and caches'}
)
"""For each required field: advice on the value to write if it is missing."""
_DATE = "a date and time with a time zone, such as 2027-01-31T12:00:00Z"
_Phrase = str | Callable[[Mapping[str, Any]], str]
_MUST_BE: Mapping[str, _Phrase] = MappingProxyType(
    {
        "literal_error": lambda context: _choices(str(context["expected"])),
        "int_type": "a whole number",
        "int_parsing": "a whole number",
        "int_parsing_size": "a smaller whole number",
        "int_from_float": "a whole number",
        "float_type": "a number",
        "float_parsing": "a number",
        "finite_number": "a finite number",
        "bool_type": "true or false",
        "bool_parsing": "true or false",
        "string_type": "text in quotes",
        "string_pattern_mismatch": lambda context: _pattern(str(context["pattern"])),
        "greater_than": lambda context: f"greater than {_number(context['gt'])}",
        "greater_than_equal": lambda context: f"at least {_number(context['ge'])}",
        "less_than": lambda context: f"less than {_number(context['lt'])}",
        "less_than_equal": lambda context: f"at most {_number(context['le'])}",
        "too_short": lambda context: f"a list of {context['min_length']} or more",
        "too_long": lambda context: f"a list of {context['max_length']} or fewer",
        "tuple_type": "a list",
        "dict_type": "a table",
        "model_type": "a table",
        "model_attributes_type": "a table",
        "datetime_type": _DATE,
        "datetime_parsing": _DATE,
        "datetime_from_date_parsing": _DATE,
        "timezone_aware": _DATE,
    }
)
"""The end of a sentence after "must be", by pydantic's name for the error."""


def fault_lines(error: ValidationError, model: type[BaseModel], sources: Sources) -> list[str]:
    """Return a line for each error: the place of the value, and its requirement."""
    lines = []
    for fault in _own_faults(error.errors(include_url=False)):
        prefix, subject = _place(fault, sources)
        lines.append(prefix + _sentence(subject, fault, model))
    return list(dict.fromkeys(lines))


def plain_faults(
    error: ValidationError, model: type[BaseModel], *, show_values: bool = True
) -> list[str]:
    """Return a line for each error of values without sources. It names the field alone."""
    faults = _own_faults(error.errors(include_url=False, include_input=show_values))
    return [_sentence(_quoted(fault["loc"]), fault, model) for fault in faults]


def _own_faults(faults: list[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors, except for lists that seem too short because their entries are wrong."""
    return [
        fault
        for fault in faults
        if fault["type"] != "too_short"
        or not any(fault["loc"] == other["loc"][:-1] for other in faults)
    ]


def plain_requirement(error: ValidationError) -> str:
    """Return the requirement of one value alone: "must be a whole number, not `x`"."""
    return _requirement(error.errors(include_url=False)[0])


def _place(fault: ErrorDetails, sources: Sources) -> tuple[str, str]:
    """Return the prefix of an error's message, which names the source of the value, and the
    message's subject."""
    location = fault["loc"]
    is_missing = fault["type"] == "missing"
    if is_missing:
        # Only the table around the field is written in a source.
        location = location[:-1]
    source = sources.of(location, is_table=is_missing) if location else None
    where = "" if source is None else source.name_of(location)
    if isinstance(source, FlagSource) and source.sets(location):
        return "", where
    if entry := _entry(fault["loc"], sources):
        shown = f" ({where})" if where else ""
        return f"{entry}{shown}: ", _quoted(fault["loc"][2:])
    if where.startswith(PREFIX) and fault["type"] not in _UNNAMED:
        return "", where
    return f"{where}: " if where else "", _quoted(fault["loc"])


def _entry(location: Location, sources: Sources) -> str:
    """Return the name of the table that a field is in, as ``pool `decode` ``; empty if the field is
    not in a named table."""
    if len(location) < 2 or location[0] not in _TABLES or not has(sources.values, location[:2]):
        return ""
    table = sources.values[str(location[0])][location[1]]
    name = table.get("name") if isinstance(table, dict) else None
    return f"{_TABLES[location[0]]} `{name}`" if isinstance(name, str) else ""


def _sentence(subject: str, fault: ErrorDetails, model: type[BaseModel]) -> str:
    if fault["type"] == "extra_forbidden":
        path = tuple(part for part in fault["loc"] if isinstance(part, str))
        if instead := advice(path):
            return f"`{'.'.join(path)}` {instead}"
        name = str(fault["loc"][-1])
        known = _fields_at(model, fault["loc"][:-1])
        close = get_close_matches(name, known, 1)
        return f"unknown field `{name}`" + (f"; did you mean `{close[0]}`?" if close else "")
    if fault["type"] == "missing":
        what = _MISSING.get(str(fault["loc"][-1]))
        return f"{subject} is missing" + (f": {what}" if what else "")
    if fault["type"] == "value_error":
        message = fault["msg"].removeprefix("Value error, ")
        return f"{subject}: {message}" if subject else message
    return f"{subject} {_requirement(fault)}"


def _requirement(fault: ErrorDetails) -> str:
    """Return the end of an error's message, such as "must be at least 1, not `0`"."""
    phrase = _MUST_BE.get(fault["type"])
    if phrase is None:
        message = fault["msg"].removeprefix("Value error, ").replace("Input should", "it should")
        return f"is not valid: {message}"
    must_be = phrase if isinstance(phrase, str) else phrase(fault.get("ctx", {}))
    return f"must be {must_be}{_given(fault, must_be)}"


def _given(fault: ErrorDetails, must_be: str) -> str:
    if "input" not in fault or any(_SECRET.search(str(one)) for one in fault["loc"]):
        return ""
    given = fault["input"]
    if isinstance(given, dict):
        return ", not a table"
    if isinstance(given, list | tuple):
        return ", not a list" if "list" not in must_be else ""
    shown = str(given).lower() if isinstance(given, bool) else str(given)
    return f", not `{textwrap.shorten(shown, _LONGEST, placeholder='…')}`"


def _quoted(location: Location) -> str:
    """Return a location as a message quotes it, `` `pools[0].role` ``; empty for the configuration
    as a whole."""
    parts = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in location)
    path = "".join(parts).removeprefix(".")
    return f"`{path}`" if path else ""


def _fields_at(model: type[BaseModel], location: Location) -> list[str]:
    """The fields of the table at ``location``."""
    for part in location:
        if isinstance(part, str):
            field = model.model_fields.get(part)
            inner = None if field is None else _model_in(field.annotation)
            if inner is None:
                return []
            model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    """Return the model of a field that is a table or a list of tables; None for any other field."""
    for one in (annotation, *get_args(annotation)):
        if isinstance(one, type) and issubclass(one, BaseModel):
            return one
    return None


def _choices(expected: str) -> str:
    """Return pydantic's list of choices, ``'a', 'b' or 'c'``, without the quotes."""
    *names, last = (name or "empty" for name in re.findall("'([^']*)'", expected))
    return f"{', '.join(names)} or {last}" if names else last


def _pattern(pattern: str) -> str:
    return _PATTERNS.get(pattern, f"text that matches {pattern}")


def _number(bound: float) -> str:
    return str(int(bound)) if bound == int(bound) else str(bound)
