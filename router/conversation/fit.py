"""Writes a conversation so that a model's chat template takes it, and nothing of it is lost.

What the template does not support is written into the text of the turns: tools, calls, results, a
system message. Each step leaves a conversation alone that does not need it.
"""

from __future__ import annotations

import asyncio
import hashlib
import re
from collections.abc import Sequence
from typing import Any

import pydantic_core

from baton.errors import InvalidRequest
from router.conversation.template_form import TemplateForm, as_parts
from router.conversation.turns import Turn, text_turn
from router.dialects.formats import ToolFormat
from router.dialects.tools import ToolUse
from router.text.chat_template import ChatTemplate

MAX_ARGUMENT_VALUES = 131_072
"""Maximum number of JSON values in the arguments of one tool call. Commas and brackets are counted,
not values."""
MAX_PARSED_CHARACTERS = 64 << 10
"""Maximum number of characters of tool call arguments that are parsed before control returns to the
event loop."""
_SHORT_ID = re.compile(r"[a-zA-Z0-9]{9}")
_USUAL = ("system", "user", "assistant", "tool")
_RAW = "arguments"
"""The key under which a template that needs an object gets arguments that are none."""


def fitted(
    turns: Sequence[Turn],
    use: ToolUse | None,
    template: ChatTemplate,
    tools: ToolFormat,
    form: TemplateForm,
) -> list[Turn]:
    """Return the messages as ``template`` takes them; ``form`` is what ``form_of`` found.

    Tools go into the system message, and calls into the assistant's messages. Results become
    messages of the user, as in the templates of Hermes and Qwen. Raises InvalidRequest for a role
    that the template does not know.
    """
    fit: list[Turn] = list(turns)
    for turn in fit:
        _check_role(turn["role"], template, form)
    if not template.knows_calls:
        fit = [_with_written_calls(turn, tools) for turn in fit]
    if not template.knows_results:
        fit = [_as_user(turn, tools) for turn in fit]
    if use is not None and not template.knows_tools:
        fit = _with_instructions(fit, tools.instructions(use.tools))
    if not form.takes_several_calls:
        fit = _one_call_each(fit)
    if not form.takes_long_ids:
        fit = [_with_short_ids(turn) for turn in fit]
    if not form.takes_late_system:
        fit = _system_first(fit)
    if not form.takes_system:
        fit = _without_system(fit)
    if not form.takes_answer_first and _begins_with_answer(fit):
        system = fit[:1] if fit[0]["role"] == "system" else []
        fit = [*system, text_turn("user", ""), *fit[len(system) :]]
    if not form.takes_repeats:
        fit = _merged(fit)
    if not form.takes_empty_calls:
        fit = [_with_null(turn) for turn in fit]
    return fit if form.takes_text else [as_parts(turn) for turn in fit]


def _check_role(role: str, template: ChatTemplate, form: TemplateForm) -> None:
    """Refuse a role that is not usual, and that the template does not write. Raises
    InvalidRequest."""
    if role not in _USUAL and not form.takes_other_roles and not template.mentions(role):
        raise InvalidRequest(
            f"role '{role}' is not one of {', '.join(_USUAL)}, and the model's chat template does "
            "not know it",
            param="messages",
        )


def _with_written_calls(turn: Turn, form: ToolFormat) -> Turn:
    if "tool_calls" not in turn:
        return turn
    functions = [call["function"] for call in turn["tool_calls"]]
    calls = form.written([(one["name"], one["arguments"]) for one in functions])
    content = turn["content"]
    rest = {name: value for name, value in turn.items() if name != "tool_calls"}
    return {**rest, "content": f"{content}\n{calls}" if content else calls}


def _as_user(turn: Turn, form: ToolFormat) -> Turn:
    return text_turn("user", form.result(turn["content"])) if turn["role"] == "tool" else turn


def _with_instructions(turns: list[Turn], instructions: str) -> list[Turn]:
    if turns and turns[0]["role"] == "system":
        first, rest = turns[0], turns[1:]
        return [{**first, "content": f"{first['content']}\n\n{instructions}"}, *rest]
    return [text_turn("system", instructions), *turns]


def _one_call_each(turns: list[Turn]) -> list[Turn]:
    """Let each call follow alone, with its result behind it."""
    fit: list[Turn] = []
    rest = list(turns)
    while rest:
        turn = rest.pop(0)
        calls = turn.get("tool_calls", ())
        if len(calls) < 2:
            fit.append(turn)
            continue
        results: list[Turn] = []
        while rest and rest[0]["role"] == "tool":
            results.append(rest.pop(0))
        for place, call in enumerate(calls):
            head = turn if not place else {"role": "assistant", "content": ""}
            fit.append({**head, "tool_calls": [call]})
            own = [one for one in results if one["tool_call_id"] == call["id"]][:1]
            results = [one for one in results if one not in own]
            fit += own
        fit += results
    return fit


def _with_short_ids(turn: Turn) -> Turn:
    if "tool_calls" in turn:
        calls = [{**call, "id": _short_id(call["id"])} for call in turn["tool_calls"]]
        return {**turn, "tool_calls": calls}
    if turn["role"] == "tool":
        return {**turn, "tool_call_id": _short_id(turn["tool_call_id"])}
    return turn


def _short_id(call_id: str) -> str:
    if _SHORT_ID.fullmatch(call_id):
        return call_id
    return hashlib.blake2b(call_id.encode(), digest_size=5).hexdigest()[:9]


def _system_first(turns: list[Turn]) -> list[Turn]:
    """Join the system messages at the beginning; later ones become the user's."""
    begin = next((n for n, turn in enumerate(turns) if turn["role"] != "system"), len(turns))
    head = "\n\n".join(turn["content"] for turn in turns[:begin])
    rest = (
        text_turn("user", turn["content"]) if turn["role"] == "system" else turn
        for turn in turns[begin:]
    )
    return [*([text_turn("system", head)] if begin else []), *rest]


def _without_system(turns: list[Turn]) -> list[Turn]:
    """Write the system message in front of the first message of the user."""
    if not turns or turns[0]["role"] != "system":
        return turns
    system, rest = turns[0]["content"], turns[1:]
    if rest and rest[0]["role"] == "user":
        return [{**rest[0], "content": f"{system}\n\n{rest[0]['content']}"}, *rest[1:]]
    return [text_turn("user", system), *rest]


def _begins_with_answer(turns: Sequence[Turn]) -> bool:
    first = next((turn for turn in turns if turn["role"] != "system"), None)
    return first is not None and first["role"] == "assistant"


def _merged(turns: Sequence[Turn]) -> list[Turn]:
    """Join messages of one role that follow one another."""
    fit: list[Turn] = []
    for turn in turns:
        last = fit[-1] if fit else None
        if last is None or last["role"] != turn["role"] or turn["role"] == "tool":
            fit.append(turn)
            continue
        joined = "\n\n".join(one["content"] for one in (last, turn) if one["content"])
        both: dict[str, Any] = {**last, **turn, "content": joined}
        if calls := [*last.get("tool_calls", ()), *turn.get("tool_calls", ())]:
            both["tool_calls"] = calls
        if last.get("name") != turn.get("name"):
            both.pop("name", None)
        fit[-1] = both
    return fit


def _with_null(turn: Turn) -> Turn:
    return {**turn, "content": None} if "tool_calls" in turn and not turn["content"] else turn


async def parsed(turns: Sequence[Turn], form: TemplateForm) -> list[Turn]:
    """Return the messages with the arguments of their tool calls as the template takes them: as an
    object, or as JSON text. Arguments that are neither stay text where the template takes that, and
    are else an object with the text. Raises InvalidRequest."""
    found, size = list[Turn](), 0
    for place, turn in enumerate(turns):
        if "tool_calls" not in turn:
            found.append(turn)
            continue
        calls = []
        for call in turn["tool_calls"]:
            function = call["function"]
            value = _value(function["arguments"], form, f"messages[{place}].tool_calls")
            calls.append({**call, "function": {**function, "arguments": value}})
            size += len(function["arguments"])
            if size > MAX_PARSED_CHARACTERS:
                await asyncio.sleep(0)
                size = 0
        found.append({**turn, "tool_calls": calls})
    return found


def _value(arguments: str, form: TemplateForm, param: str) -> Any:
    if not form.takes_object_arguments:
        return arguments or "{}"
    if len(arguments) > MAX_PARSED_CHARACTERS:
        values = sum(arguments.count(mark) for mark in ",[{")
        if values > MAX_ARGUMENT_VALUES:
            raise InvalidRequest(
                f"the arguments of a call have at most {MAX_ARGUMENT_VALUES} values", param=param
            )
    try:
        value = pydantic_core.from_json(arguments or "{}", allow_inf_nan=False)
    except ValueError:
        value = arguments
    if isinstance(value, dict):
        return value
    if value is None:
        return {}
    return arguments if form.takes_text_arguments else {_RAW: arguments}
