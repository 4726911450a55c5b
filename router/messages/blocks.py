"""The conversation of ``/v1/messages``: converts blocks to the messages of a chat template."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from baton.errors import InvalidRequest, UnsupportedParameter
from router.dialects.tools import Tool, ToolChoice, ToolUse, check_name, checked_tool, use_of
from router.inference.prompt import Ending, Turn, calls_turn, result_turn, with_reasoning
from router.messages.protocol import CountTokensRequest, MessageInput

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
    system = _system(body.system)
    if system:
        turns.append({"role": "system", "content": system})
    for place, whole in enumerate(body.messages[: message + 1]):
        kept = whole
        if place == message and not isinstance(whole.content, str):
            kept = whole.model_copy(update={"content": whole.content[: block + 1]})
        turns += _turns(kept, f"messages[{place}]")
    return turns


def _system(system: str | Sequence[Block] | None) -> str:
    if system is None or isinstance(system, str):
        return system or ""
    return _texts(system, "system")


def _turns(message: MessageInput, where: str) -> list[Turn]:
    if message.role not in {"user", "assistant"}:
        raise InvalidRequest(f"{where}.role must be user or assistant", param=f"{where}.role")
    content = message.content
    if isinstance(content, str):
        return [{"role": message.role, "content": content}]
    if not content:
        raise InvalidRequest(f"{where}.content must not be empty", param=f"{where}.content")
    split = _assistant if message.role == "assistant" else _user
    return split(content, f"{where}.content")


def _assistant(blocks: Sequence[Block], where: str) -> list[Turn]:
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[tuple[str, str, str]] = []
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        if block.get("type") == "tool_use":
            given = block.get("input")
            if not isinstance(given, dict):
                raise InvalidRequest(f"{at}.input must be an object", param=f"{at}.input")
            name = _string(block, "name", at)
            check_name(name, f"{at}.name")
            calls.append((_string(block, "id", at), name, json.dumps(given)))
        elif block.get("type") == "thinking":
            thoughts.append(_string(block, "thinking", at))
        elif block.get("type") != "redacted_thinking":
            texts.append(_text(block, at))
    text = "\n".join(texts)
    turn = calls_turn(text, calls) if calls else {"role": "assistant", "content": text}
    return [with_reasoning(turn, "\n".join(thoughts))]


def _user(blocks: Sequence[Block], where: str) -> list[Turn]:
    results: list[Turn] = []
    texts: list[str] = []
    for place, block in enumerate(blocks):
        at = f"{where}[{place}]"
        if block.get("type") == "tool_result":
            call_id = _string(block, "tool_use_id", at)
            results.append(result_turn(call_id, _result(block, at)))
        else:
            texts.append(_text(block, at))
    user: list[Turn] = [{"role": "user", "content": "\n".join(texts)}] if texts else []
    return [*results, *user]


def _result(block: Block, where: str) -> str:
    content = block.get("content", "")
    if isinstance(content, list):
        content = _texts(content, f"{where}.content")
    if not isinstance(content, str):
        raise InvalidRequest(
            f"{where}.content must be a string or a list of text blocks", param=f"{where}.content"
        )
    return f"Error: {content}" if block.get("is_error") is True else content


def _texts(blocks: Sequence[Any], where: str) -> str:
    return "\n".join(_text(block, f"{where}[{place}]") for place, block in enumerate(blocks))


def _text(block: Any, where: str) -> str:
    kind = block.get("type") if isinstance(block, dict) else None
    if not isinstance(kind, str):
        raise InvalidRequest(f"{where} must be an object with a type", param=where)
    if kind != "text":
        raise UnsupportedParameter(f"{where}: such blocks are not supported here", param=where)
    return _string(block, "text", where)


def _string(block: Block, name: str, where: str) -> str:
    value = block.get(name)
    if not isinstance(value, str):
        raise InvalidRequest(f"{where}.{name} must be a string", param=f"{where}.{name}")
    return value


def message_tools(body: CountTokensRequest) -> ToolUse | None:
    """Read the tools of a body. Raises InvalidRequest and UnsupportedParameter."""
    tools = [_tool(tool, f"tools[{place}]") for place, tool in enumerate(body.tools or ())]
    return use_of(tools, _choice(body.tool_choice))


def _tool(tool: Block, where: str) -> Tool:
    if tool.get("type") not in (None, "custom"):
        raise UnsupportedParameter(
            f"{where}: server tools are not supported", param=f"{where}.type"
        )
    schema, description = tool.get("input_schema"), tool.get("description")
    if not isinstance(schema, dict):
        raise InvalidRequest(
            f"{where}.input_schema must be an object", param=f"{where}.input_schema"
        )
    if description is not None and not isinstance(description, str):
        raise InvalidRequest(f"{where}.description must be a string", param=f"{where}.description")
    name = _string(tool, "name", where)
    return checked_tool(name, description, schema, tool.get("strict") is True, where)


def _choice(given: Block | None) -> ToolChoice:
    given = given or {"type": "auto"}
    single = given.get("disable_parallel_tool_use") is True
    match given.get("type"):
        case "auto":
            return ToolChoice("auto", single=single)
        case "none":
            return ToolChoice("none")
        case "any":
            return ToolChoice("required", single=single)
        case "tool":
            names = frozenset({_string(given, "name", "tool_choice")})
            return ToolChoice("required", names, single=True)
        case _:
            raise InvalidRequest(
                "tool_choice.type must be auto, any, tool or none", param="tool_choice.type"
            )
