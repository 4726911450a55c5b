"""Mistral's models up to tokenizer version 7: a list of calls behind a special token.

[TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]

Later versions write a name and an object without a list, and are not read.
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
    markers=Markers("[TOOL_CALLS]"),
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
