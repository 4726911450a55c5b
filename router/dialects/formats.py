"""A format of tool calls: how a family of models receives tools, calls them, and reads results.

One declaration does three things. ``parser`` reads calls, whole or while they are generated.
``written`` writes them into prompts. The grammars constrain the model to the written form.
"""

from __future__ import annotations

import abc
import json
import secrets
import string
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from baton.grammar import Grammar, GrammarKind
from router.dialects.calls import CallForm, CallWriter
from router.dialects.parser import Markers, ToolParser
from router.dialects.pieces import AnswerParser
from router.dialects.rules import literal, pattern
from router.dialects.tools import Tool, ToolUse

_LETTERS = string.ascii_letters + string.digits


def openai_id() -> str:
    """Create the id of a tool call in OpenAI's format."""
    return "call_" + "".join(secrets.choice(_LETTERS) for _ in range(24))


def mistral_id() -> str:
    """Create the id of a tool call as nine letters and digits: Mistral's chat templates reject any
    other id."""
    return "".join(secrets.choice(_LETTERS) for _ in range(9))


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolFormat(abc.ABC):
    """Base class of the formats of tool calls."""

    name: str
    form: CallWriter
    """How the format writes one tool call."""
    before: str
    """Text that the model writes before the first call of an answer."""
    between: str | None
    """Text between two calls; None: an answer ends with its first tool call, so it has no second
    one."""
    behind: str
    """Text that the model writes after the last call of an answer."""
    how_to_call: str
    """The part of the system message's instructions that shows how to write a tool call."""
    result_frame: tuple[str, str] = ("<tool_response>\n", "\n</tool_response>")
    """Text around a tool's result, for a model whose chat template has no role for it."""
    new_id: Callable[[], str] = openai_id

    @abc.abstractmethod
    def parser(self, tools: Mapping[str, Tool]) -> AnswerParser:
        """Create a parser for one answer, which may call ``tools``, by name."""

    @property
    def texts(self) -> tuple[str, ...]:
        """All markers of the format. The parser needs their text even if they are special
        tokens."""
        return self.form.texts

    def instructions(self, tools: Iterable[Tool]) -> str:
        """Return text for the system message of a model whose chat template ignores tools."""
        values = (json.dumps(tool.as_template_value(), ensure_ascii=False) for tool in tools)
        listed = "\n".join(values)
        return (
            "You can call functions. Their signatures, one in a line, are within <tools></tools>:\n"
            f"<tools>\n{listed}\n</tools>\n{self.how_to_call}"
        )

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Return the text of ``calls``, each a tool name and arguments, as the model writes tool
        calls."""
        texts = (self.form.write(name, given) for name, given in calls)
        return self.before + (self.between or "").join(texts) + self.behind

    def result(self, text: str) -> str:
        """Format a tool's result for a model whose chat template has no role for it."""
        return text.join(self.result_frame)

    def calls_grammar(self, use: ToolUse, special: Mapping[str, int]) -> Grammar:
        """Return a grammar of one tool call, or of several if ``use`` allows it, each fitting its
        schema.

        ``special``: ids of the markers that are special tokens. Raises InvalidRequest for a strict
        tool whose schema this format cannot enforce.
        """
        before, behind = literal(self.before, special), literal(self.behind, special)
        more = ""
        if self.between is not None and not use.single:
            more = f" ({literal(self.between, special)} call)*"
        return _grammar([f"start: {before} call{more} {behind}", *self._rules(use, special)])

    def free_grammar(self, use: ToolUse, special: Mapping[str, int]) -> Grammar | None:
        """Return a grammar of text in which each opening marker begins a call that fits its schema.

        None for formats whose calls need no marker of their own. Raises InvalidRequest as
        ``calls_grammar`` does.
        """
        del use, special
        return None

    def _rules(self, use: ToolUse, special: Mapping[str, int]) -> list[str]:
        tools = use.callable_tools
        rules = ["call: " + " | ".join(f"call_{place}" for place in range(len(tools)))]
        for place, tool in enumerate(tools):
            rules += self.form.rules(f"call_{place}", tool, special)
        return rules


@dataclass(frozen=True, slots=True, kw_only=True)
class MarkedFormat(ToolFormat):
    """A format whose calls are between markers."""

    markers: Markers
    form: CallForm
    reads: CallForm | None = None
    """Another form of tool calls that models may write. Calls in that form are read, but never
    written into prompts."""

    def parser(self, tools: Mapping[str, Tool]) -> AnswerParser:
        """Create a parser for one answer, which may call ``tools``, by name. See ``ToolFormat``."""
        return ToolParser(self.markers, self.form, self.reads, tools)

    @property
    def texts(self) -> tuple[str, ...]:
        """All markers of the format. The parser needs their text even if they are special tokens.
        See ``ToolFormat``."""
        markers = self.markers
        found = (markers.opening, markers.closing, *markers.behind_call, *self.form.texts)
        if self.reads is not None:
            found += self.reads.texts
        return tuple(dict.fromkeys(text for text in found if text))

    def free_grammar(self, use: ToolUse, special: Mapping[str, int]) -> Grammar | None:
        """Return a grammar of text in which each opening marker begins a tool call that fits its
        schema. See ``ToolFormat``."""
        opening = self.markers.opening
        if self.between is None or self.markers.bare or not self.before.startswith(opening):
            return None
        between, behind = literal(self.between, special), literal(self.behind, special)
        rest = literal(self.before.removeprefix(opening), special)
        calls = "call"
        if opening not in self.between:
            # A list has several calls, or none.
            calls = "call" if use.single else f"call ({between} call)*"
            calls = f"({calls})?" if self.before.endswith("[") else calls
        if opening in special:
            rules = [f"head: TEXT? <[{special[opening]}]>", "TEXT: /(?s:.+)/"]
        else:
            marker = pattern(opening)
            # A lazy text ends at the first marker.
            rules = [
                f"head[lazy]: /(?s:.*){marker}/",
                f"TEXT: /(?s:.+)/ & ~/(?s:.*){marker}(?s:.*)/",
            ]
        block = f"head {rest} {calls} {behind}"
        blocks = f"({block})?" if use.single else f"({block})*"
        return _grammar([f"start: {blocks} TEXT?", *rules, *self._rules(use, special)])


def _grammar(rules: list[str]) -> Grammar:
    return Grammar(GrammarKind.LARK, "\n".join(rules) + "\n")
