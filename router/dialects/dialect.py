"""A dialect: how a family of models writes reasoning and tool calls."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from baton.config.choices import ReasoningParserName, ToolParserName
from router.core.request import AnswerPart
from router.dialects.formats import ToolFormat, format_for
from router.dialects.reasoning import (
    AnswerParser,
    PlainParser,
    ReasoningFormat,
    ReasoningParser,
)
from router.dialects.tools import ToolUse
from router.text.chat_template import ChatTemplate


@dataclass(frozen=True, slots=True)
class Dialect:
    """A model's formats, found once for a served model."""

    tools: ToolFormat
    reasoning: ReasoningFormat | None
    """None: the model does not reason, or its reasoning stays in the content."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All markers. The parser needs their text even where they are special tokens."""
        return (*self.tools.texts, *(self.reasoning.texts if self.reasoning else ()))

    @property
    def without_reasoning(self) -> Dialect:
        """For answers that leave reasoning in the content."""
        return replace(self, reasoning=None)

    def parser(self, use: ToolUse | None, begins_in: AnswerPart = "start") -> AnswerParser:
        """A parser of one answer.

        ``use``: the tools that may be called; None leaves calls in the content. ``begins_in``:
        where the prompt ends.
        """
        rest = PlainParser() if use is None else self.tools.parser(use.names)
        if self.reasoning is None:
            return rest
        return ReasoningParser(self.reasoning, rest, begins_in)


# Qwen 3, DeepSeek R1 and V3.1, GLM 4.5, MiniMax M2, SmolLM3, and most others.
THINK = ReasoningFormat("think", "<think>", "</think>")
# Magistral.
MISTRAL = ReasoningFormat("mistral", "[THINK]", "[/THINK]")
REASONING_FORMATS = {form.name: form for form in (THINK, MISTRAL)}


def reasoning_for(
    name: ReasoningParserName, template: ChatTemplate | None
) -> ReasoningFormat | None:
    """The format called ``name``; ``auto`` finds it by the markers in the chat template."""
    if name != "auto":
        return REASONING_FORMATS.get(name)
    if template is None:
        return None
    sources = template.source + template.for_tools.source
    forms = REASONING_FORMATS.values()
    return next((form for form in forms if form.start in sources or form.end in sources), None)


def dialect_for(
    tool_parser: ToolParserName,
    reasoning_parser: ReasoningParserName,
    template: ChatTemplate | None,
    is_special: Callable[[str], bool],
) -> Dialect:
    """The dialect that the configuration names; ``auto`` derives it from the model.

    ``is_special``: whether a text is a special token of the vocabulary.
    """
    return Dialect(
        format_for(tool_parser, template, is_special), reasoning_for(reasoning_parser, template)
    )
