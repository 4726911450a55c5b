"""Fits a conversation with tools to what the model's chat template knows of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.text.chat_template import ChatTemplate
from router.tool_calls.format import ToolFormat
from router.tool_calls.tool import ToolUse

Turn = Mapping[str, Any]
"""``role`` and ``content``; ``tool_calls`` of an assistant; ``tool_call_id`` of a tool's result."""


def is_about_tools(turn: Turn) -> bool:
    """Whether it has calls, or is a call's result."""
    return turn["role"] == "tool" or "tool_calls" in turn


def fitted(
    turns: Sequence[Turn], use: ToolUse | None, template: ChatTemplate, form: ToolFormat
) -> list[Turn]:
    """What the template does not know is written into the messages' text.

    Tools go into the system message, calls into the assistant's, and results, as those of Hermes
    and Qwen do, into messages of the user.
    """
    fit: list[Turn] = list(turns)
    if not template.knows_calls:
        fit = [_with_written_calls(turn, form) for turn in fit]
    if not template.knows_results:
        fit = [_as_user(turn, form) for turn in fit]
    if use is not None and not template.knows_tools:
        fit = _with_instructions(fit, form.instructions(use.tools))
    return fit


def _with_written_calls(turn: Turn, form: ToolFormat) -> Turn:
    if "tool_calls" not in turn:
        return turn
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = form.written([(one["name"], one["arguments"]) for one in functions])
    content = turn["content"]
    return {"role": turn["role"], "content": f"{content}\n{calls}" if content else calls}


def _as_user(turn: Turn, form: ToolFormat) -> Turn:
    if turn["role"] != "tool":
        return turn
    return {"role": "user", "content": form.result(turn["content"])}


def _with_instructions(turns: list[Turn], instructions: str) -> list[Turn]:
    if turns and turns[0]["role"] == "system":
        first, rest = turns[0], turns[1:]
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *rest]
    return [{"role": "system", "content": instructions}, *turns]
