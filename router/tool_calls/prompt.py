"""Rewrites a conversation with tools for chat templates that know less of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from router.text.chat_template import ChatTemplate
from router.tool_calls.formats import ToolFormat
from router.tool_calls.tools import ToolUse

Turn = Mapping[str, Any]
"""A message: ``role``, ``content``, an assistant's ``tool_calls``, a result's ``tool_call_id``."""


def is_about_tools(turn: Turn) -> bool:
    """Whether ``turn`` has calls, or is a call's result."""
    return turn["role"] == "tool" or "tool_calls" in turn


def fitted(
    turns: Sequence[Turn], use: ToolUse | None, template: ChatTemplate, form: ToolFormat
) -> list[Turn]:
    """Write what ``template`` does not know into the text of the messages.

    Tools go into the system message, calls into the assistant's. Results go into messages of the
    user, as the templates of Hermes and Qwen do it.
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
