"""Structural tags: free text in which what stands between two markers matches a JSON schema.

    {"structures": [{"begin": "<function=f>", "schema": {...}, "end": "</function>"}],
     "triggers": ["<function="]}

Where the text has a trigger, one of the structures that begin with it follows. vLLM and SGLang have
the same shape. Markers are text: special tokens of the model are not among them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from baton.errors import InvalidRequest
from baton.grammar import Grammar, GrammarKind
from baton.grammars.json_schema import WHITESPACE, closed_schema

MAX_STRUCTURES = 128
MAX_MARKER_CHARACTERS = 256
_STYLE = {"whitespace_pattern": WHITESPACE}


def structural_tag(given: Any, param: str) -> Grammar | None:
    """The grammar of a structural tag, an object or JSON in a string; None where none is given.

    ``param`` is what the client calls it. Raises InvalidRequest.
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
            f"{param}.format is not served: give structures and triggers", param=f"{param}.format"
        )
    structures = _list(given, "structures", param)
    triggers = _list(given, "triggers", param)
    for place, trigger in enumerate(triggers):
        _check_marker(trigger, f"{param}.triggers[{place}]", empty=False)
    return Grammar(GrammarKind.LARK, _lark(_tags(structures, triggers, param)))


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


def _tags(structures: list[Any], triggers: list[str], param: str) -> dict[str, list[str]]:
    """By trigger, what may follow it: the rest of a beginning, JSON, and an end."""
    tags: dict[str, list[str]] = {}
    for place, one in enumerate(structures):
        where = f"{param}.structures[{place}]"
        if not isinstance(one, Mapping):
            raise InvalidRequest(f"{where} must be an object", param=where)
        begin, schema, end = one.get("begin"), one.get("schema", {}), one.get("end", "")
        _check_marker(begin, f"{where}.begin", empty=False)
        _check_marker(end, f"{where}.end", empty=True)
        if not isinstance(schema, Mapping):
            raise InvalidRequest(f"{where}.schema must be a JSON schema", param=f"{where}.schema")
        text = str(begin)
        # Of triggers that begin with each other, a text always has the shortest one first.
        trigger = min((t for t in triggers if text.startswith(t)), key=len, default=None)
        if trigger is None:
            raise InvalidRequest(
                f"{where}.begin begins with none of {param}.triggers", param=f"{where}.begin"
            )
        value = f"%json {json.dumps({'x-guidance': _STYLE, **closed_schema(schema)})}"
        tags.setdefault(trigger, []).append(
            " ".join(part for part in (_quoted(text[len(trigger) :]), value, _quoted(end)) if part)
        )
    return tags


def _lark(tags: Mapping[str, list[str]]) -> str:
    """The grammar, in llguidance's dialect of Lark."""
    markers = [re.escape(trigger).replace("/", r"\/") for trigger in tags]
    blocks = " | ".join(f"block_{place}" for place in range(len(tags)))
    rules = [
        f"start: ({blocks})* TEXT?",
        f"TEXT: /(?s:.+)/ & ~/(?s:.*)({'|'.join(markers)})(?s:.*)/",
    ]
    for place, (marker, bodies) in enumerate(zip(markers, tags.values(), strict=True)):
        names = [f"tag_{place}_{number}" for number in range(len(bodies))]
        rules.append(f"block_{place}: head_{place} ({' | '.join(names)})")
        # A lazy text ends where the first marker does.
        rules.append(f"head_{place}[lazy]: /(?s:.*){marker}/")
        rules += [f"{name}: {body}" for name, body in zip(names, bodies, strict=True)]
    return "\n".join(rules) + "\n"


def _quoted(text: str) -> str:
    return json.dumps(text) if text else ""
