"""Reads and writes tools in the messages of the gRPC API."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pydantic_core

from baton.errors import InvalidRequest
from baton.v1 import inference_pb2, tools_pb2
from router.conversation.turns import (
    Turn,
    calls_turn,
    check_message_count,
    checked_called_name,
    result_turn,
    with_reasoning,
)
from router.core.request import OutputDelta
from router.dialects.output import ParsedOutput
from router.dialects.pieces import Arguments, CallEnd, CallStart, Content, Reasoning
from router.dialects.tools import (
    Mode,
    Tool,
    ToolChoice,
    ToolUse,
    check_tool_count,
    checked_tool,
    use_of,
)
from router.openai.history import plain_turns

_MODES: dict[int, Mode] = {
    tools_pb2.TOOL_MODE_UNSPECIFIED: "auto",
    tools_pb2.TOOL_MODE_NONE: "none",
    tools_pb2.TOOL_MODE_REQUIRED: "required",
}


def grpc_turns(messages: Sequence[inference_pb2.ChatMessage]) -> list[Turn]:
    """Convert the messages of a conversation to turns. Raises InvalidRequest and
    UnsupportedParameter.
    """
    check_message_count(len(messages))
    given = list(messages)
    if not any(one.tool_calls or one.role == "tool" or one.reasoning for one in given):
        return plain_turns((one.role, one.content) for one in given)
    return [_turn(one, f"messages[{place}]") for place, one in enumerate(given)]


def _turn(message: inference_pb2.ChatMessage, where: str) -> Turn:
    if message.role == "tool":
        return result_turn(message.tool_call_id, message.content)
    reasoning = message.reasoning if message.role == "assistant" else ""
    if not message.tool_calls:
        (turn,) = plain_turns([(message.role, message.content)])
        return with_reasoning(turn, reasoning)
    if message.role != "assistant":
        name = f"{where}.tool_calls"
        raise InvalidRequest(f"{name}: only an assistant calls tools", param=name)
    for place, call in enumerate(message.tool_calls):
        checked_called_name(call.name, f"{where}.tool_calls[{place}].name")
    calls = [(call.id, call.name, call.arguments) for call in message.tool_calls]
    return with_reasoning(calls_turn(message.content, calls), reasoning)


def grpc_tool_use(message: tools_pb2.Tools) -> ToolUse | None:
    """Convert the tools in a request's message. Return None if no tool may be called. Raises
    InvalidRequest."""
    mode = _MODES.get(message.mode)
    if mode is None:
        raise InvalidRequest("tools.mode is not known", param="tools.mode")
    check_tool_count(max(len(message.tools), len(message.allowed)))
    tools = [_tool(tool, f"tools.tools[{place}]") for place, tool in enumerate(message.tools)]
    names = frozenset(message.allowed) or None
    return use_of(tools, ToolChoice(mode, names, single=message.single))


def _tool(message: tools_pb2.Tool, where: str) -> Tool:
    param = f"{where}.parameters"
    schema: Any = None
    if message.parameters:
        try:
            schema = pydantic_core.from_json(message.parameters, allow_inf_nan=False)
        except ValueError:
            raise InvalidRequest(f"{param} must be JSON", param=param) from None
        if not isinstance(schema, dict):
            raise InvalidRequest(f"{param} must be an object", param=param)
    return checked_tool(message.name, message.description or None, schema, message.strict, where)


def add_parsed_output(
    response: inference_pb2.GenerateResponse,
    output: ParsedOutput,
    delta: OutputDelta,
    *,
    shows_reasoning: bool,
) -> None:
    """Add the reasoning, content and tool calls of a delta to the response message."""
    text = ""
    index = len(output.calls) - 1
    for piece in output.feed(delta.text, last=delta.finish_reason is not None):
        match piece:
            case Content(part):
                text += part
            case CallStart(name):
                index += 1
                response.tool_calls.add(index=index, id=output.calls[index].id, name=name)
            case Arguments(part):
                response.tool_calls.add(index=index, arguments=part)
            case Reasoning(part) if shows_reasoning:
                response.reasoning += part
            case CallEnd() | Reasoning():
                pass
    response.text = text
