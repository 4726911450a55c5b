"""Hermes 2 Pro and 3, Qwen 2.5 and 3, SmolLM3: an object within tags for each call.

<tool_call>
{"name": "f", "arguments": {"x": 1}}
</tool_call>
"""

from __future__ import annotations

from router.tool_calls.format import ToolFormat
from router.tool_calls.marked_parser import Markers

HERMES = ToolFormat(
    name="hermes",
    markers=Markers("<tool_call>", "</tool_call>"),
    before="<tool_call>\n",
    between="\n</tool_call>\n<tool_call>\n",
    behind="\n</tool_call>",
    arguments_key="arguments",
    how_to_call=(
        "To call one, write an object with its name and its arguments within tags:\n"
        '<tool_call>\n{"name": "<name>", "arguments": {<arguments>}}\n</tool_call>\n'
        "For several calls repeat this. Results come within <tool_response></tool_response>. "
        "When no function helps, answer in plain words."
    ),
)
