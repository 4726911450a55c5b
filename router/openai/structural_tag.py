"""Structural tags: free text whose parts between two markers match a JSON schema.

    {"structures": [{"begin": "<function=f>", "schema": {...}, "end": "</function>"}],
     "triggers": ["<function="]}

After a trigger in the text, one of the structures that begin with it must follow. vLLM and SGLang
use the same format. Markers are plain text and cannot contain special tokens of the model.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest
from baton.grammar import Grammar, GrammarKind
from baton.grammars.structural_tag import trigger_of

MAX_STRUCTURES = 128
MAX_MARKER_CHARACTERS = 256


def structural_tag(given: Any, param: str) -> Grammar | None:
    """Return the grammar of a structural tag, an object or JSON in a string; None if not given.

    ``param`` is the name of the request field, for errors. Raises InvalidRequest.
    """
    if given is None:
        return None
    if isinstance(given, str):
        try:
            given = json.loads(given)
        except (ValueError, RecursionError):
            raise InvalidRequest(f"{param} is not JSON", param=param) from None
    if not isinstance(given, Mapping):
        raise InvalidRequest(f"{param} must be an object", param=param)
    if "format" in given:
        raise InvalidRequest(
            f"{param}.format is not supported: give structures and triggers",
            param=f"{param}.format",
        )
    structures = _list(given, "structures", param)
    triggers = _list(given, "triggers", param)
    for place, trigger in enumerate(triggers):
        _check_marker(trigger, f"{param}.triggers[{place}]", empty=False)
    for place, one in enumerate(structures):
        _check_structure(one, triggers, param, f"{param}.structures[{place}]")
    # Converted to a grammar where it is compiled, off the event loop.
    known = {"structures": structures, "triggers": triggers}
    return Grammar(GrammarKind.STRUCTURAL_TAG, json.dumps(known))


def _list(given: Mapping[str, Any], name: str, param: str) -> list[Any]:
    found = given.get(name)
    if not isinstance(found, list) or not 0 < len(found) <= MAX_STRUCTURES:
        raise InvalidRequest(
            f"{param}.{name} must be a list of 1 to {MAX_STRUCTURES}", param=f"{param}.{name}"
        )
    return found


def _check_marker(marker: Any, param: str, *, empty: bool) -> None:
    fits = isinstance(marker, str) and len(marker) <= MAX_MARKER_CHARACTERS
    if not fits or not (marker or empty):
        least = 0 if empty else 1
        raise InvalidRequest(
            f"{param} must be a string of {least} to {MAX_MARKER_CHARACTERS} characters",
            param=param,
        )


def _check_structure(one: Any, triggers: list[str], param: str, where: str) -> None:
    """Check one entry of ``structures``; ``where`` is its path in the request field ``param``."""
    if not isinstance(one, Mapping):
        raise InvalidRequest(f"{where} must be an object", param=where)
    _check_marker(one.get("begin"), f"{where}.begin", empty=False)
    _check_marker(one.get("end", ""), f"{where}.end", empty=True)
    if not isinstance(one.get("schema", {}), Mapping):
        raise InvalidRequest(f"{where}.schema must be a JSON schema", param=f"{where}.schema")
    if trigger_of(one["begin"], triggers) is None:
        raise InvalidRequest(
            f"{where}.begin begins with none of {param}.triggers", param=f"{where}.begin"
        )
