"""The grammar of an answer that must call tools, in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from baton.grammar import Grammar, GrammarKind
from router.tool_calls.format import ToolFormat
from router.tool_calls.tool import Tool, ToolUse

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value: a small model may else write white space for ever."""


def calls_grammar(form: ToolFormat, use: ToolUse, special: Mapping[str, int]) -> Grammar:
    """One call, or more where ``use`` allows that, each with arguments that fit its schema.

    ``special`` gives the ids of markers that are special tokens: their text alone would be drawn
    as other tokens, and the model would not know its own marker.
    """
    before, between, behind = (
        _text(text, special) for text in (form.before, form.between, form.behind)
    )
    tools = use.callable_tools
    more = "" if use.single else f" ({between} call)*"
    rules = [f"start: {before} call{more} {behind}"]
    rules.append("call: " + " | ".join(f"call_{place}" for place in range(len(tools))))
    for place, tool in enumerate(tools):
        head = f'{{"name": {json.dumps(tool.name)}, "{form.arguments_key}": '
        rules.append(f'call_{place}: {json.dumps(head)} arguments_{place} "}}"')
        rules.append(f"arguments_{place}: %json {json.dumps(_schema(tool))}")
    return Grammar(GrammarKind.LARK, "\n".join(rules) + "\n")


def _text(text: str, special: Mapping[str, int]) -> str:
    """A rule's part for ``text``."""
    if not special:
        return json.dumps(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return " ".join(f"<[{special[p]}]>" if p in special else json.dumps(p) for p in parts if p)


def _schema(tool: Tool) -> dict[str, Any]:
    # What the library cannot check is refused where the client asked for strictness.
    style = _JSON_STYLE if tool.strict else {**_JSON_STYLE, "lenient": True}
    return {"type": "object", **tool.parameters, "x-guidance": style}
