"""SmolLM2: one list of calls within tags; an empty one stands for no call.

<tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]</tool_call>

SmolLM3 writes an object within each pair of tags, which this parser reads as well.
"""

from __future__ import annotations

from router.tool_calls.format import ToolFormat
from router.tool_calls.marked_parser import Markers

SMOLLM = ToolFormat(
    name="smollm",
    markers=Markers("<tool_call>", "</tool_call>"),
    before="<tool_call>[",
    between=", ",
    behind="]</tool_call>",
    arguments_key="arguments",
    how_to_call=(
        "To call some, write a list of objects with name and arguments within tags:\n"
        '<tool_call>[{"name": "<name>", "arguments": {<arguments>}}]</tool_call>\n'
        "Results come within <tool_response></tool_response>. "
        "When no function helps, answer in plain words."
    ),
)
