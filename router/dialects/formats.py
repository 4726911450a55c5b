"""Tool-call formats, one for each family of models.

A format says how a model is given tools, writes calls, and reads their results. Each parser also
reads what related models write.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from baton.config.choices import ToolParserName
from router.dialects.call_readers import ARGUMENTS, CALL_ID, CallShape
from router.dialects.parser import Markers, ToolParser
from router.dialects.tools import Tool
from router.text.chat_template import ChatTemplate

_LETTERS = string.ascii_letters + string.digits


def openai_id() -> str:
    """A call id like OpenAI's."""
    return "call_" + "".join(secrets.choice(_LETTERS) for _ in range(24))


def mistral_id() -> str:
    """A call id of nine letters and digits: Mistral's chat templates refuse any other."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How a family of models is given tools, writes calls, and reads their results."""

    name: str
    markers: Markers
    before: str
    """Text before the first call. ``between`` separates two calls, ``behind`` follows the last."""
    between: str
    behind: str
    arguments_key: str
    how_to_call: str
    """The part of the instructions that shows a call."""
    shape: CallShape = field(default_factory=CallShape)
    named: bool = False
    """Whether a call is written as a name and the object of its arguments."""
    new_id: Callable[[], str] = openai_id

    def parser(self, names: Collection[str]) -> ToolParser:
        """A parser for one answer, which may call the tools in ``names``."""
        return ToolParser(self.markers, self.shape, names)

    @property
    def texts(self) -> tuple[str, ...]:
        """The markers. The parser needs their text even where they are special tokens."""
        found = (self.markers.opening, self.markers.closing)
        named = (CALL_ID, ARGUMENTS) if self.markers.named else ()
        return tuple(text for text in (*found, *named) if text)

    def instructions(self, tools: Iterable[Tool]) -> str:
        """Text for the system message of a model whose chat template ignores tools."""
        listed = "\n".join(_dump(tool.as_template_value()) for tool in tools)
        return (
            "You can call functions. Their signatures, one in a line, are within <tools></tools>:\n"
            f"<tools>\n{listed}\n</tools>\n{self.how_to_call}"
        )

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Calls, each a name and arguments, as the model writes them."""
        texts = (self.opened(name) + _dump(given) + self.closed for name, given in calls)
        return self.before + self.between.join(texts) + self.behind

    def opened(self, name: str) -> str:
        """The part of a call before its arguments."""
        if self.named:
            return name + ARGUMENTS
        return f'{{"name": {_dump(name)}, "{self.arguments_key}": '

    @property
    def closed(self) -> str:
        """The part of a call after its arguments."""
        return "" if self.named else "}"

    def result(self, text: str) -> str:
        """A tool's result for a model whose chat template has no role for it."""
        return f"<tool_response>\n{text}\n</tool_response>"


def _dump(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


# Hermes 2 Pro and 3, Qwen 2.5 and 3, SmolLM3: an object within tags for each call.
#
#     <tool_call>
#     {"name": "f", "arguments": {"x": 1}}
#     </tool_call>
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

# Llama 3.1 to 3.3: an answer that is a call, or calls after a special token.
#
#     {"name": "f", "parameters": {"x": 1}}
#     <|python_tag|>{"name": "f", "parameters": {"x": 1}}; {"name": "g", "parameters": {}}
#
# An answer that is another JSON object is content. Code after the token, for the tools that these
# models have built in, is content too.
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

# Mistral: calls after a special token. Up to tokenizer version 7 a list; from version 11 on the
# token again for each call, and two more tokens. Both formats read what the other one writes.
#
#     [TOOL_CALLS][{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]
#     [TOOL_CALLS]f[ARGS]{"x": 1}[TOOL_CALLS]g[ARGS]{}
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

# SmolLM2: one list of calls within tags; an empty one stands for no call. SmolLM3 writes an object
# within each pair of tags, which this parser reads as well.
#
#     <tool_call>[{"name": "f", "arguments": {"x": 1}}, {"name": "g", "arguments": {}}]</tool_call>
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

FORMATS = {form.name: form for form in (HERMES, LLAMA3, SMOLLM, MISTRAL, MISTRAL_ARGS)}


def format_for(
    name: ToolParserName, template: ChatTemplate | None, is_special: Callable[[str], bool]
) -> ToolFormat:
    """The format called ``name``; ``auto`` finds it by the template and the vocabulary.

    Markers in the template decide first. Next comes Llama's special token, if the template knows
    tools, then SmolLM's name. All other models get Hermes' format.
    """
    if name != "auto":
        return FORMATS[name]
    if template is None:
        return HERMES
    template = template.for_tools
    if HERMES.markers.opening in template.source:
        return HERMES
    if MISTRAL.markers.opening in template.source:
        return MISTRAL_ARGS if ARGUMENTS in template.source else MISTRAL
    if template.knows_tools and is_special(LLAMA3.markers.opening):
        return LLAMA3
    return SMOLLM if "SmolLM" in template.source else HERMES
