"""Mistral's models: calls behind a special token.

Up to tokenizer version 7 a list; from version 11 on the token again for each call, and two more:

    [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
    [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}

Both formats read what the other one writes.
"""

from __future__ import annotations

import secrets
import string

from router.tool_calls.format import ToolFormat
from router.tool_calls.marked_parser import Markers


def mistral_id() -> str:
    """Nine letters and digits: the chat templates of these models refuse any other id."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


MISTRAL = ToolFormat(
    name="mistral",
    markers=Markers("[TOOL_CALLS]", named=True),
    before="[TOOL_CALLS][",
    between=", ",
    behind="]",
    arguments_key="arguments",
    how_to_call=(
        "To call some, write a list of objects with name and arguments:\n"
        '[TOOL_CALLS][{"name": "<name>", "arguments": {<arguments>}}]\n'
        "When no function helps, answer in plain words."
    ),
    new_id=mistral_id,
)

MISTRAL_ARGS = ToolFormat(
    name="mistral_args",
    markers=Markers("[TOOL_CALLS]", named=True),
    before="[TOOL_CALLS]",
    between="[TOOL_CALLS]",
    behind="",
    arguments_key="arguments",
    how_to_call=(
        "To call one, write its name and an object of its arguments:\n"
        "[TOOL_CALLS]<name>[ARGS]{<arguments>}\n"
        "For several calls repeat this. When no function helps, answer in plain words."
    ),
    new_id=mistral_id,
    named=True,
)
