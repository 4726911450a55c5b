"""The conversation of ``/v1/messages``: converts blocks to turns."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest, UnsupportedParameter
from router.conversation.content import part_text, string, text_of
from router.conversation.turns import (
    Turn,
    arguments_text,
    begin_of_current_turn,
    calls_turn,
    checked_called_name,
    result_turn,
    text_turn,
    with_reasoning,
)
from router.inference.prompt import Ending
from router.messages.protocol import CountTokensRequest, MessageInput

_ROLES = frozenset({"user", "assistant", "system"})
_SERVER_CALLS = ("server_tool_use", "mcp_tool_use")
"""Types of the blocks with which another server has called its own tools."""

Block = Mapping[str, Any]


def message_turns(body: CountTokensRequest) -> list[Turn]:
    """Convert a body's conversation to turns. Raises InvalidRequest and UnsupportedParameter."""
    if not body.messages:
        raise InvalidRequest("messages must not be empty", param="messages")
    turns = prefix_turns(body, len(body.messages))
    if "tool_calls" in turns[-1]:
        raise UnsupportedParameter(
            "the last message has calls: their results must follow", param="messages"
        )
    return turns


def ending_of(turns: Sequence[Turn]) -> Ending:
    """Return how the chat template must end the prompt. If the last message is the assistant's, the
    answer continues that message."""
    return "open" if turns[-1]["role"] == "assistant" else "answer"


def prefix_turns(body: CountTokensRequest, message: int, block: int = 0) -> list[Turn]:
    """Return the turns of a body up to and including a block of one of its messages.

    ``message`` is the number of that message. The number -1 takes only the system message; a number
    after the last message takes all messages. Raises as ``message_turns`` does.
    """
    turns: list[Turn] = []
    if system := text_of(body.system, "system"):
        turns.append(text_turn("system", system))
    begin = begin_of_current_turn([one.role == "assistant" for one in body.messages])
    for place, whole in enumerate(body.messages[: message + 1]):
        kept = whole
        if place == message and isinstance(whole.content, list):
            kept = whole.model_copy(update={"content": whole.content[: block + 1]})
        turns += _turns(kept, f"messages[{place}]", current=place >= begin)
    return turns


def _turns(message: MessageInput, where: str, *, current: bool) -> list[Turn]:
    if message.role not in _ROLES:
        raise InvalidRequest(
            f"{where}.role must be user, assistant or system", param=f"{where}.role"
        )
    content, where = message.content, f"{where}.content"
    if message.role == "assistant" and not isinstance(content, str):
        return _Answer(content or []).turns(where)
    if not content and not isinstance(content, str):
        raise InvalidRequest(f"{where} must not be empty", param=where)
    if isinstance(content, str):
        return [text_turn(message.role, content)]
    if message.role == "system":
        return [text_turn("system", text_of(content, where, current=current))]
    return _user(content, where, current=current)


class _Answer:
    """An assistant's message. Results of server tools, which are among its blocks, become messages
    of their own; calls of such tools without a result are left out."""

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        self._answered = [block["tool_use_id"] for block in blocks if "tool_use_id" in block]
        self._turns: list[Turn] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._calls: list[tuple[str, str, str]] = []

    def turns(self, where: str) -> list[Turn]:
        """Return the turns. Raises InvalidRequest."""
        for place, block in enumerate(self._blocks):
            self._add(block, f"{where}[{place}]")
        if self._has_more or not self._turns:
            self._end()
        return self._turns

    @property
    def _has_more(self) -> bool:
        return bool(self._texts or self._thoughts or self._calls)

    def _add(self, block: Block, where: str) -> None:
        kind = block.get("type")
        if kind == "thinking":
            self._thoughts.append(string(block, "thinking", where))
        elif kind in ("tool_use", *_SERVER_CALLS):
            if kind == "tool_use" or block.get("id") in self._answered:
                name = checked_called_name(block.get("name"), f"{where}.name")
                call_id, given = string(block, "id", where), arguments_text(block.get("input"))
                self._calls.append((call_id, name, given))
        elif "tool_use_id" in block:
            if self._has_more:
                self._end()
            call_id = string(block, "tool_use_id", where)
            self._turns.append(result_turn(call_id, _result(block, where)))
        elif (text := part_text(block, where, current=False)) is not None:
            self._texts.append(text)

    def _end(self) -> None:
        text = "\n".join(self._texts)
        turn = calls_turn(text, self._calls) if self._calls else text_turn("assistant", text)
        self._turns.append(with_reasoning(turn, "\n".join(self._thoughts)))
        self._texts, self._thoughts, self._calls = [], [], []


def _user(blocks: Sequence[Block], where: str, *, current: bool) -> list[Turn]:
    results: list[Turn] = []
    texts: list[str] = []
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        if block.get("type") == "tool_result" or "tool_use_id" in block:
            call_id = string(block, "tool_use_id", at)
            results.append(result_turn(call_id, _result(block, at, current=current)))
        elif (text := part_text(block, at, current=current)) is not None:
            texts.append(text)
    user = [text_turn("user", "\n".join(texts))] if texts or not results else []
    return [*results, *user]


def _result(block: Block, where: str, *, current: bool = False) -> str:
    content = block.get("content")
    if content is None or isinstance(content, str) or _is_content(content):
        text = text_of(content, f"{where}.content", current=current)
    elif block.get("type") == "tool_result":
        raise InvalidRequest(
            f"{where}.content must be a string or a list of blocks", param=f"{where}.content"
        )
    else:
        # The results of server tools are of many kinds.
        text = json.dumps(content, ensure_ascii=False)
    return f"Error: {text}" if block.get("is_error") is True else text


def _is_content(content: Any) -> bool:
    """Whether a result is a list of blocks that any message may have."""
    return isinstance(content, list) and not any(
        isinstance(one, dict) and str(one.get("type", "")).endswith("web_search_result")
        for one in content
    )
