"""A dialect: how a family of models writes reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.config.choices import ReasoningParserName, ToolParserName
from baton.errors import ConfigError
from router.core.request import AnswerPart
from router.dialects.families import KIMI_K2, QWEN3_CODER, format_for
from router.dialects.formats import ToolFormat
from router.dialects.harmony import CHANNEL, ENDS, MESSAGE, START, HarmonyParser
from router.dialects.harmony import FORMAT as HARMONY
from router.dialects.pieces import AnswerParser, PlainParser
from router.dialects.reasoning import ReasoningFormat, ReasoningParser
from router.dialects.tools import ToolUse
from router.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Dialect:
    """The formats in which a served model writes reasoning and tool calls, found once."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    """Format of the model's reasoning; None: the model does not reason, or its reasoning stays in
    the content."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All markers of the dialect. The parser needs their text even where they are special
        tokens."""
        return (*self.tools.texts, *self.answer_texts)

    @property
    def answer_texts(self) -> tuple[str, ...]:
        """The markers in answers to requests without tools."""
        if self.tools is HARMONY:
            return HARMONY.texts
        return self.reasoning.texts if self.reasoning else ()

    def parser(self, use: ToolUse | None, begins_in: AnswerPart = "start") -> AnswerParser:
        """Create a parser of one answer.

        ``use``: the tools that may be called; None leaves calls in the content. ``begins_in``: the
        part of the answer in which the prompt ends.
        """
        tools = {} if use is None else {tool.name: tool for tool in use.callable_tools}
        if self.tools is HARMONY:
            return HarmonyParser(tools, begins_in, shows_reasoning=self.reasoning is None)
        rest = PlainParser() if use is None else self.tools.parser(tools)
        if self.reasoning is None:
            return rest
        return ReasoningParser(self.reasoning, rest, begins_in)


# Qwen 3, DeepSeek R1 and V3.1, GLM 4.5, Kimi K2, MiniMax M2, SmolLM3, and most others.
THINK = ReasoningFormat("think", "<think>", "</think>")
# Magistral.
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
# gpt-oss. HarmonyParser reads it.
HARMONY_REASONING = ReasoningFormat(
    "harmony",
    f"{CHANNEL}analysis{MESSAGE}",
    ENDS[0],
    answer=f"{START}assistant{CHANNEL}final{MESSAGE}",
)
_CALLS_IN_REASONING = {
    KIMI_K2.name: KIMI_K2.markers.opening,
    # The tag alone may be a word of the reasoning.
    QWEN3_CODER.name: f"{QWEN3_CODER.markers.opening}\n<function=",
}
"""Text that begins a call, by format. Models of these formats sometimes call tools within their
reasoning without ending it first."""
REASONING_FORMATS = {form.name: form for form in (THINK, MISTRAL, HARMONY_REASONING)}


def reasoning_for(
    name: ReasoningParserName, template: ChatTemplate | None
) -> ReasoningFormat | None:
    """Return the format of reasoning called ``name``. For ``auto``, find the format by the markers
    in the chat template."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    if template is None:
        return None
    sources = template.source + template.for_tools.source
    forms = (THINK, MISTRAL)
    return next((form for form in forms if form.start in sources or form.end in sources), None)


def dialect_for(
    tool_parser: ToolParserName,
    reasoning_parser: ReasoningParserName,
    template: ChatTemplate | None,
    is_special: Callable[[str], bool],
) -> Dialect:
    """Return the dialect that the configuration names. ``auto`` derives a format from the model.

    ``is_special``: whether a text is a special token of the vocabulary. Raises ConfigError if the
    formats of tool calls and of reasoning do not fit together.
    """
    if reasoning_parser == "harmony" and tool_parser == "auto":
        tool_parser = "harmony"
    tools = format_for(tool_parser, template, is_special)
    if (tools is HARMONY) != (reasoning_parser == "harmony") and (
        reasoning_parser == "harmony" or reasoning_parser not in {"auto", "none"}
    ):
        raise ConfigError(
            f"reasoning_parser {reasoning_parser} does not fit tool_parser {tools.name}:"
            " harmony must be set for both"
        )
    if tools is HARMONY:
        return Dialect(tools, None if reasoning_parser == "none" else HARMONY_REASONING)
    reasoning = reasoning_for(reasoning_parser, template)
    if reasoning is not None and tools.name in _CALLS_IN_REASONING:
        reasoning = replace(reasoning, calls_end_it=(_CALLS_IN_REASONING[tools.name],))
    return Dialect(tools, reasoning)
