"""The turns of a conversation, which every API parses its history into.

A turn is what chat templates take as a message. Histories may come from any server, so that only
what is malformed is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest

Turn = Mapping[str, Any]
"""A message of a conversation: ``role``, ``content``, a speaker's ``name``, an assistant's
``tool_calls`` and ``reasoning_content``, and a tool result's ``tool_call_id``."""
MAX_MESSAGES = 2048
"""Maximum number of messages in a conversation, as at OpenAI."""
MAX_NAME_CHARACTERS = 256
"""Maximum number of characters of the name of a speaker, or of a function in a history."""


def text_turn(role: str, content: str, name: str | None = None) -> Turn:
    """Build a message of text. ``name`` is that of its speaker."""
    return {"role": role, "content": content, **({"name": name} if name else {})}


def calls_turn(content: str, calls: Sequence[tuple[str, str, Any]]) -> Turn:
    """Build an assistant's message from tool calls, each with id, name and arguments.

    Arguments stay JSON text until a template needs them.
    """
    values = [
        {"id": name, "type": "function", "function": {"name": tool, "arguments": given}}
        for name, tool, given in calls
    ]
    # Some templates fail if content is null.
    return {"role": "assistant", "content": content, "tool_calls": values}


def with_reasoning(turn: Turn, reasoning: str | None) -> Turn:
    """Return an assistant's message with the reasoning that precedes it, if there is any."""
    return {**turn, "reasoning_content": reasoning} if reasoning else turn


def result_turn(call_id: str, content: str) -> Turn:
    """Build the message that holds a tool call's result."""
    return {"role": "tool", "content": content, "tool_call_id": call_id}


def joined_calls(turns: list[Turn], calls: Turn) -> None:
    """Add calls to the assistant's last message, or as a message of their own. One message then has
    all calls of an answer, and the text before them."""
    last = turns[-1] if turns else None
    if last is not None and last["role"] == "assistant":
        turns[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *calls["tool_calls"]]}
    else:
        turns.append(calls)


def arguments_text(given: Any) -> str:
    """Return the arguments of an earlier call as text. They may be an object, or nothing."""
    if given is None:
        return "{}"
    return given if isinstance(given, str) else json.dumps(given, ensure_ascii=False)


def checked_called_name(name: Any, where: str) -> str:
    """Check the name of a function that was called. Another server's rules for names may be wider
    than those for the tools of a request. Raises InvalidRequest."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS:
        raise InvalidRequest(
            f"{where} must be a string of 1 to {MAX_NAME_CHARACTERS} characters", param=where
        )
    return name


def is_about_tools(turn: Turn) -> bool:
    """Return whether a message has tool calls, or is the result of one."""
    return turn["role"] == "tool" or "tool_calls" in turn


def check_message_count(messages: int) -> None:
    """Check that a conversation does not have too many messages. Raises InvalidRequest."""
    if messages > MAX_MESSAGES:
        raise InvalidRequest(f"at most {MAX_MESSAGES} messages are possible", param="messages")


def begin_of_current_turn(is_answer: Sequence[bool]) -> int:
    """Return the place of the first message after the last answer.

    ``is_answer`` is whether each message is the assistant's. What the model cannot see is refused
    from there on, and left out before.
    """
    answers = [place for place, is_one in enumerate(is_answer) if is_one]
    return answers[-1] + 1 if answers else 0
