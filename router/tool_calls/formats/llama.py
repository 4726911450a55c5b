"""Llama 3.1 to 3.3: an answer that is a call, or calls behind a special token.

{"name": "f", "parameters": {"x": 1}}
<|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}

An answer that is another JSON object is content. Code behind the token, for the tools that these
models have built in, is content too.
"""

from __future__ import annotations

from router.tool_calls.call_reader import CallShape
from router.tool_calls.format import ToolFormat
from router.tool_calls.marked_parser import Markers

LLAMA3 = ToolFormat(
    name="llama3",
    markers=Markers("<|python_tag|>", separators=";", bare=True),
    before="",
    between="; ",
    behind="",
    arguments_key="parameters",
    how_to_call=(
        "To call one, answer with nothing but an object with its name and its parameters:\n"
        '{"name": "<name>", "parameters": {<parameters>}}\n'
        "When no function helps, answer in plain words."
    ),
    shape=CallShape(needs_arguments=True),
)
