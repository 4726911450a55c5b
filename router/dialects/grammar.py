"""Grammars of answers that must or may call tools, in llguidance's Lark dialect."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from baton.grammar import Grammar, GrammarKind
from router.dialects.formats import ToolFormat
from router.dialects.tools import Tool, ToolUse

_JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One way to write each value: a small model may otherwise write white space forever."""


def calls_grammar(form: ToolFormat, use: ToolUse, special: Mapping[str, int]) -> Grammar:
    """A grammar of one call, or of several if ``use`` allows it, each fitting its tool's schema.

    ``special`` gives the ids of markers that are special tokens. Their text alone would be drawn
    as other tokens, which the model does not know as its marker.
    """
    before, between, behind = _frame(form, special)
    more = "" if use.single else f" ({between} call)*"
    return _grammar([f"start: {before} call{more} {behind}", *_call_rules(form, use, special)])


def free_grammar(form: ToolFormat, use: ToolUse, special: Mapping[str, int]) -> Grammar | None:
    """A grammar of any text in which each opening marker begins a call that fits its schema.

    Returns None for formats in which a call may come without its marker.
    """
    if form.markers.bare:
        return None
    opening = form.markers.opening
    _, between, behind = _frame(form, special)
    rest = _text(form.before.removeprefix(opening), special)
    calls = "call"
    if opening not in form.between:
        # A list, which may be empty.
        calls = "call?" if use.single else f"(call ({between} call)*)?"
    if opening in special:
        rules = [f"head: TEXT? <[{special[opening]}]>", "TEXT: /(?s:.+)/"]
    else:
        marker = re.escape(opening).replace("/", r"\/")
        # A lazy text ends where the first marker does.
        rules = [
            f"head[lazy]: /(?s:.*){marker}/",
            f"TEXT: /(?s:.+)/ & ~/(?s:.*){marker}(?s:.*)/",
        ]
    block = f"head {rest} {calls} {behind}"
    blocks = f"({block})?" if use.single else f"({block})*"
    return _grammar([f"start: {blocks} TEXT?", *rules, *_call_rules(form, use, special)])


def _grammar(rules: list[str]) -> Grammar:
    return Grammar(GrammarKind.LARK, "\n".join(rules) + "\n")


def _frame(form: ToolFormat, special: Mapping[str, int]) -> tuple[str, str, str]:
    before, between, behind = (
        _text(text, special) for text in (form.before, form.between, form.behind)
    )
    return before, between, behind


def _call_rules(form: ToolFormat, use: ToolUse, special: Mapping[str, int]) -> list[str]:
    tools = use.callable_tools
    rules = ["call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
    closed = _text(form.closed, special)
    for place, tool in enumerate(tools):
        opened = _text(form.opened(tool.name), special)
        rules.append(f"call_{place}: {opened} arguments_{place} {closed}")
        rules.append(f"arguments_{place}: %json {json.dumps(_schema(tool))}")
    return rules


def _text(text: str, special: Mapping[str, int]) -> str:
    """The part of a rule that matches ``text``."""
    if not special:
        return json.dumps(text) if text else ""
    parts = re.split("(" + "|".join(map(re.escape, special)) + ")", text)
    return " ".join(f"<[{special[p]}]>" if p in special else json.dumps(p) for p in parts if p)


def _schema(tool: Tool) -> dict[str, Any]:
    # With strict, a schema that llguidance cannot check in full is refused.
    style = _JSON_STYLE if tool.strict else {**_JSON_STYLE, "lenient": True}
    return {"type": "object", **tool.parameters, "x-guidance": style}
