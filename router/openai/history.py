"""The conversation of a chat completion: converts its messages to turns.

Histories may hold what any server has answered: no content, refusals, reasoning under several
names, older forms of calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from typing import Any

from baton.errors import InvalidRequest
from router.conversation.content import split_thoughts, text_of
from router.conversation.turns import (
    MAX_NAME_CHARACTERS,
    Turn,
    arguments_text,
    begin_of_current_turn,
    calls_turn,
    checked_called_name,
    result_turn,
    text_turn,
    with_reasoning,
)
from router.openai.protocol import Message

_ROLES = {"developer": "system"}
"""Newer names of roles; templates know the older ones."""
_RESULTS = frozenset({"tool", "function"})
_ROLE = re.compile(r"[a-zA-Z0-9_-]{1,64}")
Call = tuple[str, str, str]
"""Id, name and arguments of a call."""


def openai_turns(messages: Sequence[Message]) -> list[Turn]:
    """Convert the messages of an HTTP body. Raises InvalidRequest, UnsupportedParameter."""
    history, begin = (
        _History(),
        begin_of_current_turn([one.role == "assistant" for one in messages]),
    )
    for place, message in enumerate(messages):
        history.add(message, f"messages[{place}]", current=place >= begin)
    return not_empty(history.turns)


def plain_turns(messages: Iterable[tuple[str, str]]) -> list[Turn]:
    """Convert pairs of role and text to turns. Raises InvalidRequest."""
    return not_empty(
        [
            text_turn(checked_role(role, f"messages[{place}]"), content)
            for place, (role, content) in enumerate(messages)
        ]
    )


def not_empty(turns: list[Turn]) -> list[Turn]:
    """Check that there are messages. Raises InvalidRequest."""
    if not turns:
        raise InvalidRequest("messages must not be empty", param="messages")
    return turns


def checked_role(role: str, where: str) -> str:
    """Return the name of a role for chat templates. Whether the model's template takes a role that
    is not usual is known later. Raises InvalidRequest."""
    if _ROLE.fullmatch(role) is None:
        raise InvalidRequest(
            f"{where}.role must be system, developer, user, assistant or tool",
            param=f"{where}.role",
        )
    return _ROLES.get(role, role)


class _History:
    """Turns, and the calls that have no result yet."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self._open: list[Call] = []

    def add(self, message: Message, where: str, *, current: bool) -> None:
        """Add a message. Raises InvalidRequest, UnsupportedParameter."""
        role = checked_role(message.role, where)
        if role in _RESULTS:
            turn = self._result(message, where, current=current)
        elif role == "assistant":
            turn = self._answer(message, where)
        else:
            turn = self._said(message, role, where, current=current)
        if message.name:
            if len(message.name) > MAX_NAME_CHARACTERS:
                raise InvalidRequest(
                    f"{where}.name has at most {MAX_NAME_CHARACTERS} characters",
                    param=f"{where}.name",
                )
            turn = {**turn, "name": message.name}
        self.turns.append(turn)

    def _said(self, message: Message, role: str, where: str, *, current: bool) -> Turn:
        if message.tool_calls:
            name = f"{where}.tool_calls"
            raise InvalidRequest(f"{name}: only an assistant calls tools", param=name)
        if message.content is None:
            name = f"{where}.content"
            raise InvalidRequest(f"{name} must not be null", param=name)
        return text_turn(role, text_of(_plain(message), f"{where}.content", current=current))

    def _answer(self, message: Message, where: str) -> Turn:
        content, thoughts = split_thoughts(_plain(message))
        text = text_of(content, f"{where}.content", current=False)
        if not text and isinstance(message.refusal, str):
            text = message.refusal
        if not text and isinstance(message.audio, dict):
            text = str(message.audio.get("transcript") or "")
        calls = _calls(message, where, len(self.turns))
        self._open += calls
        turn = calls_turn(text, calls) if calls else text_turn("assistant", text)
        return with_reasoning(turn, _reasoning(message, thoughts))

    def _result(self, message: Message, where: str, *, current: bool) -> Turn:
        """Return the result of a call, which is found by its id; else by its name, or it is the
        first call that has no result."""
        content = text_of(_plain(message), f"{where}.content", current=current)
        found = [
            call
            for call in self._open
            if call[0] == message.tool_call_id
            or (not message.tool_call_id and message.name in (None, call[1]))
        ][:1]
        for call in found:
            self._open.remove(call)
        return result_turn(message.tool_call_id or (found[0][0] if found else "call_0"), content)


def _plain(message: Message) -> Any:
    """Return the content of a message as JSON values."""
    if not isinstance(message.content, list):
        return message.content
    return [
        part if isinstance(part, str) else part.model_dump(exclude_unset=True)
        for part in message.content
    ]


def _reasoning(message: Message, thoughts: Sequence[Any]) -> str:
    """Return an answer's reasoning, under the first of its names that has any."""
    if found := message.reasoning_content or message.reasoning:
        return found
    parts = [*thoughts, *(message.reasoning_details or ()), *(message.thinking_blocks or ())]
    texts = [
        one[name]
        for one in parts
        if isinstance(one, dict)
        for name in ("thinking", "text", "summary")
        if isinstance(one.get(name), str)
    ]
    return "\n".join(texts)


def _calls(message: Message, where: str, number: int) -> list[Call]:
    """Return the calls of an answer, with an id each. Raises InvalidRequest."""
    given = [*(message.tool_calls or ())]
    if isinstance(message.function_call, dict):
        given.append({"function": message.function_call})
    return [_call(one, f"{where}.tool_calls[{n}]", f"{number}_{n}") for n, one in enumerate(given)]


def _call(call: dict[str, Any], where: str, number: str) -> Call:
    called, custom = call.get("function"), call.get("custom")
    if isinstance(custom, dict):
        name, arguments = custom.get("name"), json.dumps({"input": custom.get("input") or ""})
        where += ".custom"
    elif isinstance(called, dict):
        name, arguments = called.get("name"), arguments_text(called.get("arguments"))
        where += ".function"
    else:
        raise InvalidRequest(f"{where}.function must be an object", param=f"{where}.function")
    call_id = call.get("id")
    found = call_id if isinstance(call_id, str) and call_id else f"call_{number}"
    return found, checked_called_name(name, f"{where}.name"), arguments
